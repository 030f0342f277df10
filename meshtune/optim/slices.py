"""An element-wise optimizer, stepped on a slice of one parameter at a time.

What a step needs is then never there for all of a model at once: the float32 forms of bfloat16 weights, moments that wait in
the memory of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.optim.kept import state_bytes
from meshtune.optim.rounding import Position, join, noise, round_by_chance, split

__all__ = ["REST", "Rounding", "Sliced", "stepped_alone"]

REST = "compensation"
"""What rounding has taken from a weight, among its moments."""

# Elements of a slice: on the CPU what its caches hold, elsewhere what is worth launching kernels for.
_CPU_SLICE, _SLICE = 1 << 16, 1 << 23
_TOGETHER = 64
_COUNTER = "step"  # torch's name of the steps that a parameter has had, a tensor


@dataclass(frozen=True)
class Rounding:
    """How weights that are held in bfloat16 are rounded after an update that is computed in float32.

    `stochastic`: up or down by chance. `kahan`: to the nearest, and what that takes away is kept beside in 16 bits, so that both
    together are the float32 weight. Either way moments are held in bfloat16 too and rounded by chance: to the nearest, a running
    average that keeps 0.999 of itself would never fall.
    """

    kind: Literal["stochastic", "kahan"]
    seed: int
    positions: Mapping[nn.Parameter, Position] = field(repr=False)


class Sliced(torch.optim.Optimizer):
    """`inner`, which must treat each element of a parameter by itself, stepped on slices.

    Moments are held on the device `home` (None: where their parameter is). Groups and state are those of `inner`. TrainStep
    writes the number of the step into each group as `train_step`: random numbers follow from it.
    """

    def __init__(self, inner: torch.optim.Optimizer, rounding: Rounding | None = None, home: str | None = None):
        self.inner, self._rounding, self._home = inner, rounding, home
        self.defaults, self.state, self.param_groups = inner.defaults, inner.state, inner.param_groups

    def bytes_kept(self, parameter: nn.Parameter, shape: tuple[int, ...], itemsize: int) -> int:
        """About how many bytes are kept for a parameter of the whole `shape`, all ranks together."""
        kahan = self._rounding is not None and self._rounding.kind == "kahan" and parameter.dtype == torch.bfloat16
        return state_bytes(self.inner, parameter, shape, itemsize) + 2 * math.prod(shape) * kahan

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            after = group
            for parameter in group["params"]:
                if parameter.grad is not None:
                    after = self._step(group, parameter)
            group.update({**after, "params": group["params"]})

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Update one parameter. Returns its group as the optimizer has left it."""
        held = self.state[parameter]
        constants = {key: value for key, value in held.items() if not _is_moment(key, value, parameter)}
        moments = {key: _rows(value) for key, value in held.items() if _is_moment(key, value, parameter)}
        known = tuple(key for key in moments if key != REST)
        weights, gradients, after = _rows(parameter), _rows(parameter.grad), group
        for first, last in _slices(weights):
            form = self._form(group, parameter, first, last)
            own = {key: form.opened(self._fetched(moments[key][first:last], weights)) for key in known}
            own |= {key: value.clone() if isinstance(value, Tensor) else value for key, value in constants.items()}
            rest = self._fetched(moments[REST][first:last], weights) if REST in moments else None
            values = form.weights(weights[first:last], rest)
            found, after = stepped_alone(self.inner, group, values, form.opened(gradients[first:last]), own)
            found |= form.put(values, weights[first:last])
            for key, value in found.items():
                if not isinstance(value, Tensor) or value.ndim == 0:
                    held[key] = value
                    continue
                if key not in moments:
                    held[key] = self._empty(parameter, form.dtype(value))
                    moments[key] = _rows(held[key])
                form.put_moment(key, value, moments[key][first:last])
        return after

    def _empty(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """A moment to be filled, laid out as its parameter."""
        if self._home is None:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        pinned = parameter.device.type == "cuda"
        return torch.zeros_like(parameter, dtype=dtype, device=self._home, pin_memory=pinned, requires_grad=False)

    def _fetched(self, moment: Tensor, weights: Tensor) -> Tensor:
        return moment if self._home is None else moment.to(weights.device, non_blocking=True)

    def _form(self, group: dict[str, Any], parameter: nn.Parameter, first: int, last: int) -> _Form:
        if self._rounding is None or parameter.dtype != torch.bfloat16:
            return _Form()
        return _Rounded(self._rounding, group.get("train_step", 0), parameter, first, last)


class _Form:
    """In what form a slice of a parameter is updated: as it is held."""

    def opened(self, held: Tensor) -> Tensor:
        """A gradient or moment for the optimizer to use."""
        return held

    def weights(self, held: Tensor, rest: Tensor | None) -> Tensor:
        """Weights for the optimizer to change."""
        return held

    def put(self, values: Tensor, held: Tensor) -> dict[str, Tensor]:
        """Put changed weights back. Returns what has to be kept beside them."""
        return {}

    def dtype(self, moment: Tensor) -> torch.dtype:
        """In which a moment that the optimizer has made is held."""
        return moment.dtype

    def put_moment(self, key: str, value: Tensor, held: Tensor) -> None:
        held.copy_(value)


class _Rounded(_Form):
    """In float32, rounded to bfloat16."""

    def __init__(self, rounding: Rounding, step: int, parameter: nn.Parameter, first: int, last: int):
        self._kahan, self._position = rounding.kind == "kahan", rounding.positions[parameter]
        self._key = f"{rounding.seed} {step} {self._position.name}"
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        self._rows = self._position.rows(first, last, tuple(local.shape), local.device)
        self._columns = self._position.columns(tuple(local.shape), local.device)

    def opened(self, held: Tensor) -> Tensor:
        return _filled_up(held.to(torch.float32))

    def weights(self, held: Tensor, rest: Tensor | None) -> Tensor:
        return self.opened(held) if rest is None else _filled_up(join(held, rest))

    def put(self, values: Tensor, held: Tensor) -> dict[str, Tensor]:
        if not self._kahan:
            held.copy_(self._by_chance("", values))
            return {}
        nearest, rest = split(self._own(values))
        held.copy_(nearest)
        return {REST: rest}

    def dtype(self, moment: Tensor) -> torch.dtype:
        return torch.bfloat16 if moment.dtype == torch.float32 else moment.dtype

    def put_moment(self, key: str, value: Tensor, held: Tensor) -> None:
        held.copy_(value if key == REST else self._by_chance(key, value))

    def _own(self, values: Tensor) -> Tensor:
        """What belongs to the slice, as the matrix that it is."""
        rows, columns = len(self._rows), len(self._columns)
        return values[: rows * columns].view(rows, columns)

    def _by_chance(self, what: str, values: Tensor) -> Tensor:
        return round_by_chance(self._own(values), noise(f"{self._key} {what}", self._rows, self._columns))


def stepped_alone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Tensor, gradient: Tensor, state: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Step `optimizer` on `values`, in place, as if they were the only parameter of `group` and had this gradient and state.

    Returns state and group as they are then; the optimizer's own are left as they were.
    """
    parameter = nn.Parameter(values, requires_grad=False)
    parameter.grad = gradient
    groups, alone = optimizer.param_groups, {**group, "params": [parameter]}
    optimizer.param_groups, optimizer.state[parameter] = [alone], state
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, found = groups, optimizer.state.pop(parameter)
    return found, alone


def _filled_up(values: Tensor) -> Tensor:
    """Flat, with zeros up to a multiple of what a processor computes at once: what is left over another code computes, whose last
    digit may differ, and which numbers those are differs from layout to layout."""
    return torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % _TOGETHER))


def _slices(rows: Tensor) -> Iterator[tuple[int, int]]:
    """First and last of the rows of each slice."""
    elements = _CPU_SLICE if rows.device.type == "cpu" else _SLICE
    each = max(1, elements // max(rows.shape[1], 1))
    for first in range(0, rows.shape[0], each):
        yield first, min(first + each, rows.shape[0])


def _rows(tensor: Tensor | None) -> Tensor:
    """This rank's part of a tensor as a matrix of rows of its last dimension, sharing its memory."""
    assert tensor is not None
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.view(math.prod(local.shape[:-1]), local.shape[-1]) if local.ndim else local.view(1, 1)


def _is_moment(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether part of a state has a value for each of the parameter's; of a weight without dimensions a counter looks alike."""
    return isinstance(value, Tensor) and key != _COUNTER and value.shape == parameter.shape
