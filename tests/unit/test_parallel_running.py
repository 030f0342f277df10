"""What a rank of any layout computes without the others' help."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from meshtune.parallel.running import Parallel


def test_a_stage_that_trains_nothing_counts_its_zero_where_its_weights_are() -> None:
    """They may wait in the memory of the CPU, and so do what the other stages count: a reduction wants one kind of device."""
    parallel = object.__new__(Parallel)
    parallel._root, parallel._parts, parallel._counted_elsewhere = nn.Linear(2, 2), {}, set()
    parallel._layout = SimpleNamespace(device_type="meta", size=lambda axis: 1)  # type: ignore[assignment]
    norm = parallel.grad_norm([])
    assert norm.device.type == "cpu" and norm == 0
