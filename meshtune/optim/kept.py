"""What of an optimizer goes on in a resumed run: its moments, and numbers in its groups that change as it goes.

Learning rate, weight decay and other constants are not among them: they follow from the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.optim.regions import Region, Scope

__all__ = ["StateTensor", "innermost", "kept", "kept_of_region", "make", "state_bytes"]

_MOMENTS = {"AdamW": 2, "Lion": 1}
"""How many tensors as large as a parameter are kept for it, where an optimizer does not say so itself."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state, to be written to a checkpoint or filled from one, in place.

    Attributes:
        of: the parameter whose state it is, or its name in checkpoints.
        key: what the tensor is called beside others of that parameter.
        whole: the shape of the whole tensor of which it is some rows; None where it is laid out as the parameter is, or is whole.
        start: the first of those rows.
        put: called with the tensor when it was filled, where it is a copy of something else.
    """

    of: nn.Parameter | str
    key: str
    tensor: Tensor
    whole: tuple[int, ...] | None = None
    start: int = 0
    put: Callable[[Tensor], None] | None = None


def kept(optimizer: torch.optim.Optimizer) -> Iterator[StateTensor]:
    """All that this rank keeps of an optimizer's state."""
    own: Callable[[], Iterator[StateTensor]] | None = getattr(optimizer, "kept", None)
    if own is not None:
        yield from own()
        return
    numbers = getattr(innermost(optimizer), "numbers", ())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (StateTensor(parameter, key, value) for key, value in state.items() if isinstance(value, Tensor))
            if state:
                yield from (_number(parameter, key, group) for key in numbers if key in group)


def make(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], stored: Collection[str]) -> None:
    """Give those parameters a state to be filled whose names are among `stored`, and the others none.

    A step with zero gradients at learning rate zero makes it. What else that changes is to be filled too: weights may be, in
    their last digit, and numbers.
    """
    own: Callable[..., None] | None = getattr(optimizer, "make", None)
    if own is not None:
        own(names, stored)
        return
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            parameter.grad = torch.zeros_like(parameter) if names[parameter] in stored else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def state_bytes(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, shape: tuple[int, ...], itemsize: int
) -> int:
    """About how many bytes an optimizer keeps for a parameter of the whole `shape`, all ranks together."""
    own: Callable[..., int] | None = getattr(optimizer, "bytes_kept", None)
    if own is not None:
        return own(parameter, shape, itemsize)
    if (inner := getattr(optimizer, "inner", None)) is not None:
        return state_bytes(inner, parameter, shape, itemsize)
    moments = getattr(optimizer, "moments", _MOMENTS.get(type(optimizer).__name__))
    if moments is None:
        moments = int(bool(optimizer.defaults.get("momentum")))
    return int(moments) * math.prod(shape) * itemsize


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The library's optimizer inside those that only change how it is stepped."""
    while (inner := getattr(optimizer, "inner", None)) is not None:
        optimizer = inner
    return optimizer


def kept_of_region(
    region: Region, scope: Scope, state: Mapping[str, Any], group: dict[str, Any], numbers: Iterable[str]
) -> Iterator[StateTensor]:
    """The state of a region, as rows of what the whole tensor's state is."""
    entries = [StateTensor(region.name, key, tensor) for key, tensor in _flat(state)]
    if state:
        entries += [_number(region.name, key, group) for key in numbers if key in group]
    for entry in entries:
        yield _placed(region, scope, entry)


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested lists, and those that one in few bits is made of; its table of values is a constant."""
    for key, value in state.items():
        if isinstance(value, list | tuple):
            yield from _flat({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}_")
        elif hasattr(value, "__tensor_flatten__"):
            yield from ((f"{prefix}{key}_{part}", getattr(value, part).view(-1)) for part in ("codes", "scale"))
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def _number(of: nn.Parameter | str, key: str, group: dict[str, Any]) -> StateTensor:
    """A number of a group, kept for each of its parameters, as groups differ from layout to layout."""

    def put(tensor: Tensor) -> None:
        group[key] = type(group[key])(tensor.item())

    return StateTensor(of, f"group_{key}", torch.tensor(group[key], dtype=torch.float64), put=put)


def _placed(region: Region, scope: Scope, entry: StateTensor) -> StateTensor:
    """Where an entry of a region lies among those of the whole tensor.

    Matrices of a stack lie one after another, and so do blocks of rows, whose numbers are kept once for each row: which rows
    are together differs from layout to layout.
    """
    tensor, put = entry.tensor, entry.put
    if region.single:
        return StateTensor(
            entry.of, entry.key, tensor[None], (region.whole[0], *tensor.shape), region.start, _inside(put)
        )
    if scope != "blocks" or not region.whole:
        return entry
    rows = region.whole[0]
    if tensor.ndim == 0:
        spread = tensor.expand(region.length).clone()
        return StateTensor(entry.of, entry.key, spread, (rows,), region.start, _inside(put or tensor.copy_))
    first, length = len(tensor) * region.start // region.length, len(tensor) * rows // region.length
    return StateTensor(entry.of, entry.key, tensor, (length, *tensor.shape[1:]), first, put)


def _inside(put: Callable[[Tensor], Any] | None) -> Callable[[Tensor], None] | None:
    if put is None:
        return None
    write = put

    def first(tensor: Tensor) -> None:
        write(tensor[0])

    return first
