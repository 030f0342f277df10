"""Record now, reduce later: a value recorded on a device costs no synchronisation until it is due."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["mean", "sum", "max", "last"]
Number = float | int


class Recorder:
    """Collects scalars over the steps of one logging interval.

    The values are global already (reduced over the ranks by whoever computed them): no collective runs here.
    All of an interval are kept and reduced on the host in float64, integers exactly: a counter held in bf16
    stops at 256, one in fp32 at 2**24."""

    def __init__(self) -> None:
        self._values: dict[str, list[Number | Tensor]] = {}
        self._reductions: dict[str, Reduction] = {}

    def record(self, name: str, value: Number | Tensor, reduce: Reduction = "mean") -> None:
        """Add one value of `name`: a number, or a tensor of no dimension, which is copied and stays on its
        device.

        Raises `ValueError` for any other tensor, for a reduction that is unknown or differs from the one that
        `name` was recorded with before."""
        if reduce not in get_args(Reduction):
            raise ValueError(f"metric {name}: reduce is {reduce!r}, wanted one of {', '.join(get_args(Reduction))}")
        known = self._reductions.setdefault(name, reduce)
        if known != reduce:
            raise ValueError(f"metric {name}: recorded with reduce={known!r} before, now with {reduce!r}")
        held = value if isinstance(value, (int, float)) else _detached(name, value)
        values = self._values.setdefault(name, [])
        if reduce == "last":
            values.clear()
        values.append(held)

    def flush(self) -> dict[str, Number]:
        """The reduced values in the order in which the names were first recorded; the recorder is empty
        afterwards.

        Sums, maxima and last values of integers stay integers. A NaN among the values of a maximum is the
        result."""
        host = _to_host(self._values)
        reduced = {name: _reduce(values, self._reductions[name]) for name, values in host.items()}
        self._values.clear()
        return reduced

    def state_dict(self) -> dict[str, Any]:
        """What has been recorded since the last flush, as plain numbers: saved with a checkpoint that falls
        inside a logging interval, it makes the resumed run log the same values as the unbroken one."""
        return {
            name: {"reduce": self._reductions[name], "values": values}
            for name, values in _to_host(self._values).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, in place of whatever was recorded."""
        self._values = {name: list(entry["values"]) for name, entry in state.items()}
        self._reductions = {name: entry["reduce"] for name, entry in state.items()}


def _detached(name: str, value: Tensor) -> Tensor:
    if hasattr(value, "full_tensor"):
        raise ValueError(f"metric {name}: a distributed tensor; record its global value (`.full_tensor()`)")
    if value.ndim != 0:
        raise ValueError(f"metric {name}: a tensor of shape {tuple(value.shape)}; wanted one of no dimension")
    # A copy, since accumulators are often reset or added to in place.
    return value.detach().clone()


def _to_host(values: Mapping[str, Sequence[Number | Tensor]]) -> dict[str, list[Number]]:
    """Bring every tensor to the host with one transfer for each device and dtype."""
    groups: dict[tuple[Any, Any], list[Tensor]] = {}
    for entries in values.values():
        for entry in entries:
            if not isinstance(entry, (int, float)):
                groups.setdefault((entry.device, entry.dtype), []).append(entry)
    if not groups:
        return {name: list(entries) for name, entries in values.items()}  # type: ignore[arg-type]
    import torch

    fetched = {key: iter(torch.stack(tensors).tolist()) for key, tensors in groups.items()}
    return {
        name: [e if isinstance(e, (int, float)) else next(fetched[e.device, e.dtype]) for e in entries]
        for name, entries in values.items()
    }


def _reduce(values: Sequence[Number], reduction: Reduction) -> Number:
    if reduction == "last":
        return values[-1]
    if reduction == "max":
        return math.nan if any(math.isnan(value) for value in values) else max(values)
    if all(isinstance(value, int) for value in values):
        total: Number = sum(values)
    elif all(math.isfinite(value) for value in values):
        total = math.fsum(values)
    else:
        # fsum refuses inf - inf; plain addition gives the NaN that belongs there.
        total = sum(values)
    return total if reduction == "sum" else total / len(values)
