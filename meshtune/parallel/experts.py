"""Expert parallelism: each rank of `ep` holds a part of the experts, and rows travel to the experts that they are routed to.

A pair of hooks on the model's own experts module: before it runs, rows go to the ranks that hold their experts; it runs on what
has arrived, one row for each expert that a row is for; after it, results travel back and are added up for each token. A row
travels once to each rank, to however many experts there. No row is dropped, and there is no capacity.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshtune.errors import ModelError
from meshtune.layout import Layout
from meshtune.layout.collectives import all_to_all
from meshtune.layout.experts import Experts
from meshtune.layout.peers import Peers
from meshtune.parallel.sorted_experts import SortedDispatch
from meshtune.parallel.tensor import cut_parameters

_AS_HELD = MixedPrecisionPolicy()


def share_out(model: nn.Module, experts: Experts, layout: Layout) -> None:
    """Cut the experts of `model` that `experts` describes over the ranks of `ep`, and let each serve the tokens of all."""
    cut_parameters(model, experts.cuts(), layout)
    for outer in experts.around:
        for name in outer.counters:
            setattr(model.get_submodule(outer.path), name, experts.share(layout.ep))
    dispatch(model.get_submodule(experts.path), experts, layout)


def dispatch(module: nn.Module, experts: Experts, layout: Layout) -> None:
    """From now on `module`, which `experts` describes, serves all tokens of the ranks of `ep` with this rank's experts.

    Its parameters are to hold those alone, `[count / ep, ...]`, from the first forward on. Where ranks of `tp` have the same
    tokens, each takes its share of them and gives zeros for the others: their sum is the whole.

    Raises LayoutError if the experts do not divide.
    """
    if layout.ep == 1:
        return
    local = experts.share(layout.ep)
    hooks = SortedDispatch(experts, local, layout) if experts.by_rows else _Dispatch(experts.path, local, layout)
    for name in experts.counters:
        setattr(module, name, local)
    module.register_forward_pre_hook(hooks.send, with_kwargs=True)
    # Results come back before any other hook, as one that sums over tp, sees the output.
    module.register_forward_hook(hooks.collect, prepend=True)


def shard_experts(
    module: nn.Module, layout: Layout, policy: MixedPrecisionPolicy = _AS_HELD, offload: OffloadPolicy | None = None
) -> None:
    """Shard this rank's experts over the ranks that hold the same ones; gradients are summed.

    Routing weights keep their own dtype: a module of a block that is sharded as one gets them so, too.
    """
    policy = replace(policy, cast_forward_inputs=False)
    mesh = layout.expert_data_parallel_mesh
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload or OffloadPolicy())
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # else a factor is a reduction that gloo does not have


@dataclass(frozen=True)
class _Route:
    """Where the rows of one call went, and what they are for here.

    Of this rank's tokens [N, hidden], `tokens` are those that travel, in the order in which they leave; `sent` and `received`
    count the rows to and from each rank. `rows` [pairs] says which of the received rows each row of the module's input is.
    """

    shape: torch.Size
    tokens: Tensor
    sent: list[int]
    received: list[int]
    rows: Tensor


class _Dispatch:
    """The two hooks of one module. Between them it keeps the route of the one call that is running.

    How many rows travel is known only when they do, so no compiler can look into it; what stands around it, it can.
    """

    def __init__(self, path: str, local: int, layout: Layout):
        self._path, self._local = path, local
        self._peers, self._layout = layout.peers("ep"), layout
        self._route: _Route | None = None

    @torch.compiler.disable
    def send(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        hidden_states, index, weights = self._checked(given)
        own = self._own_tokens(len(hidden_states))
        counts, tokens, places, slots = _departures(index[own], weights[own], self._local, self._peers.size)
        tokens = tokens + own.start
        sent, received = _exchange_counts(counts, self._peers)
        arrived = all_to_all(hidden_states[tokens], sent, received, self._peers)
        slots = all_to_all(slots, sent, received, self._peers)
        places = self._peers.all_to_all(places, sent, received)
        rows, columns = (places >= 0).nonzero(as_tuple=True)
        self._route = _Route(hidden_states.shape, tokens, sent, received, rows)
        if not len(rows):
            return _one_empty_row(arrived, slots), {}
        experts = places[rows, columns].to(index.dtype)
        return (arrived[rows], experts[:, None], slots[rows, columns][:, None]), {}

    @torch.compiler.disable
    def collect(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        route, self._route = self._route, None
        assert route is not None
        results = output[: len(route.rows)]
        summed = results.new_zeros(sum(route.received), results.shape[1]).index_add(0, route.rows, results)
        returned = all_to_all(summed, route.received, route.sent, self._peers)
        return returned.new_zeros(route.shape[0], returned.shape[1]).index_add(0, route.tokens, returned)

    def _own_tokens(self, count: int) -> slice:
        rank, size = self._layout.rank("tp"), self._layout.size("tp")
        return slice(rank * count // size, (rank + 1) * count // size)

    def _checked(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        shapes = [tuple(getattr(argument, "shape", ())) for argument in given]
        if [len(shape) for shape in shapes] != [2, 2, 2] or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
            raise ModelError(
                f"distributed.ep_size: {self._path} was called with shapes {shapes}, not with hidden states [tokens, hidden], "
                "expert indices and weights [tokens, k]; write `ep_size: 1`"
            )
        return given


def _departures(index: Tensor, weights: Tensor, local: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What leaves for which rank, from `index` and `weights` [N, k] of tokens: how many tokens for each rank [ranks], and,
    in order of rank and then of token, which tokens [S], their places among that rank's experts [S, k] (-1: not there), and
    their weights there [S, k] (0: not there)."""
    owner = index.div(local, rounding_mode="floor")
    there = owner[None] == torch.arange(ranks, device=index.device)[:, None, None]  # [ranks, N, k]
    needed = there.any(2)
    rank, tokens = needed.nonzero(as_tuple=True)
    there = there[rank, tokens]
    places = torch.where(there, index[tokens] % local, -1).to(torch.int32)
    return needed.sum(1), tokens, places, torch.where(there, weights[tokens], 0)


def _exchange_counts(counts: Tensor, peers: Peers) -> tuple[list[int], list[int]]:
    """Rows for each rank to rows to and from each rank."""
    ones = [1] * peers.size
    sent, received = torch.stack([counts, peers.all_to_all(counts, ones, ones)]).tolist()
    return sent, received


def _one_empty_row(arrived: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For experts that no row came to: zeros, with weight zero. Like any other call it runs every kernel, leaves a gradient, if
    of zeros, on each parameter, and is part of the graph, without which the other ranks would wait in the backward."""
    row = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])])
    weight = torch.cat([slots.reshape(-1, 1), slots.new_zeros(1, 1)])
    return row, torch.zeros(1, 1, dtype=torch.int64, device=row.device), weight
