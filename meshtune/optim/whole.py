"""An optimizer whose update of a weight needs more of its tensor than a rank holds: the owner of a region computes it.

Each step, the parts of a region's weights and gradients go to its owner, which runs the library's optimizer on the whole, and
new weights come back to all who hold parts. So the numbers are those of one process, bit for bit where gradients are, and
a region's state is held once in the world. A step moves weights and gradients once, and nothing where one rank has all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.optim.bare import BareOptimizer
from meshtune.optim.exchange import any_rank, exchange, tables, this_rank
from meshtune.optim.kept import StateTensor, kept_of_region
from meshtune.optim.methods import Method
from meshtune.optim.regions import Held, Scope, Share, share_out
from meshtune.optim.rounding import Position

__all__ = ["WholeTensors", "local_part"]

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class WholeTensors(BareOptimizer):
    """Steps the optimizers that `make` makes, one for each region that this rank owns.

    Every rank of the world must make one, and step it, with whatever parameters it has.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        learning_rate: float,
        make: Make,
        scope: Scope,
        positions: Mapping[nn.Parameter, Position],
        device: torch.device,
        method: Method,
        local: Callable[[Tensor], Tensor],
    ):
        """`make` gets a list of one group with one parameter; `method` says which numbers in it change, and how large
        states are; `local` gives what of a tensor this rank has."""
        super().__init__([{"lr": learning_rate, **group} for group in groups])
        self._device, self._scope, self._method, self._rank = device, scope, method, this_rank()
        self._local = local
        self._parameters = {positions[p].name: p for group in groups for p in group["params"]}
        own = {
            name: Held(positions[p].shape, str(p.dtype), tuple(positions[p].boxes))
            for name, p in self._parameters.items()
        }
        everyone = tables(own)
        self._names = list(dict.fromkeys(name for table in everyone for name in table))
        self._shares = share_out(everyone, scope)
        group_of = {positions[p].name: group for group in self.param_groups for p in group["params"]}
        self._owned = {
            share: _Owned(share, group_of[share.region.name], make, device)
            for share in self._shares
            if share.owner == self._rank
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient on any rank."""
        found = [name in self._parameters and self._parameters[name].grad is not None for name in self._names]
        present = dict(zip(self._names, any_rank(found, self._device), strict=True))
        for dtype in sorted({share.dtype for share in self._shares}):
            shares = [share for share in self._shares if share.dtype == dtype]
            self._update([share for share in shares if present[share.region.name]], getattr(torch, dtype[6:]))
        for share, owned in self._owned.items():
            if not present[share.region.name]:
                owned.optimizer.step()  # counts the step

    def _update(self, shares: Sequence[Share], dtype: torch.dtype) -> None:
        like = torch.empty(0, dtype=dtype, device=self._device)
        sent: dict[int, list[Tensor]] = defaultdict(list)
        sizes: dict[int, int] = defaultdict(int)
        for share in shares:
            for rank, part in share.sources:
                if rank == self._rank != share.owner:
                    sent[share.owner] += [part.of(self._weight(share)), part.of(self._gradient(share))]
                elif share.owner == self._rank != rank:
                    sizes[rank] += 2 * part.size
        arrived = {rank: _Message(message) for rank, message in exchange(sent, sizes, like).items()}
        sent, sizes = defaultdict(list), defaultdict(int)
        for share in shares:
            if share.owner == self._rank:
                updated = self._step_region(share, arrived, like)
                for rank, parts in share.parts.items():
                    if rank != self._rank:
                        sent[rank] += [part.within(updated) for part in parts]
            elif self._rank in share.parts:
                sizes[share.owner] += sum(part.size for part in share.parts[self._rank])
        back = {rank: _Message(message) for rank, message in exchange(sent, sizes, like).items()}
        for share in shares:
            if share.owner != self._rank:
                for part in share.parts.get(self._rank, ()):
                    target = part.of(self._weight(share))
                    target.copy_(back[share.owner].take(target))

    def _step_region(self, share: Share, arrived: Mapping[int, _Message], like: Tensor) -> Tensor:
        """Update a region that this rank owns, and its own parts of it; returns the whole."""
        if share.sources[0][0] == self._rank and len(share.sources) == 1:
            part = share.sources[0][1]
            weight, gradient = part.of(self._weight(share)), part.of(self._gradient(share))
            self._owned[share].step(weight, gradient)
            return weight
        weight, gradient = (like.new_empty(share.region.shape) for _ in range(2))
        for rank, part in share.sources:
            for whole, own in ((weight, self._weight), (gradient, self._gradient)):
                target = part.within(whole)
                target.copy_(part.of(own(share)) if rank == self._rank else arrived[rank].take(target))
        self._owned[share].step(weight, gradient)
        for part in share.parts[self._rank]:
            part.of(self._weight(share)).copy_(part.within(weight))
        return weight

    def _weight(self, share: Share) -> Tensor:
        return self._local(self._parameters[share.region.name].detach())

    def _gradient(self, share: Share) -> Tensor:
        parameter = self._parameters[share.region.name]
        return torch.zeros_like(self._weight(share)) if parameter.grad is None else self._local(parameter.grad)

    def kept(self) -> Iterator[StateTensor]:
        """The state of the regions that this rank owns."""
        for share, owned in self._owned.items():
            yield from kept_of_region(share.region, self._scope, owned.state, owned.group, self._method.numbers)

    def bytes_kept(self, parameter: nn.Parameter, shape: tuple[int, ...], itemsize: int) -> int:
        """Of the state of a tensor of `shape`, all owners together."""
        return self._method.size(shape, itemsize)

    @torch.no_grad()
    def make(self, names: Mapping[nn.Parameter, str], stored: Collection[str]) -> None:
        """Give the regions of the tensors `stored` a state to be filled, by a step on zeros that stand for their weights, and the
        others none."""
        for share, owned in self._owned.items():
            owned.optimizer.state.clear()
            if share.region.name in stored:
                zeros = torch.zeros(share.region.shape, dtype=getattr(torch, share.dtype[6:]), device=self._device)
                owned.step(zeros, torch.zeros_like(zeros))


class _Owned:
    """The optimizer of one region, over a parameter that has values only while it steps."""

    def __init__(self, share: Share, outer: dict[str, Any], make: Make, device: torch.device):
        dtype = getattr(torch, share.dtype[6:])
        self._absent = torch.zeros((), dtype=dtype, device=device).expand(share.region.shape)
        self._parameter = nn.Parameter(self._absent)
        constants = {key: value for key, value in outer.items() if key not in ("params", "names")}
        self.optimizer = make([{**constants, "params": [self._parameter]}])
        self._outer = outer

    @property
    def group(self) -> dict[str, Any]:
        (group,) = self.optimizer.param_groups
        return group

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self._parameter, {})

    def step(self, weight: Tensor, gradient: Tensor) -> None:
        """Update `weight` in place."""
        if isinstance(self.group["lr"], Tensor):
            self.group["lr"].fill_(self._outer["lr"])
        else:
            self.group["lr"] = self._outer["lr"]
        self._parameter.data, self._parameter.grad = weight, gradient
        self.optimizer.step()
        self._parameter.data, self._parameter.grad = self._absent, None


class _Message:
    """What has come from a rank, read from its beginning."""

    def __init__(self, flat: Tensor):
        self._flat, self._read = flat, 0

    def take(self, like: Tensor) -> Tensor:
        start, self._read = self._read, self._read + math.prod(like.shape)
        return self._flat[start : self._read].view(like.shape)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
