"""Metrics are recorded without a synchronisation and reduced exactly."""

from __future__ import annotations

import json
import math

import pytest
import torch

from meshtune.observe.metrics import Recorder


def test_each_reduction_over_floats_and_tensors() -> None:
    """Numbers and tensors of one name mix; each reduction does what its name says."""
    recorder = Recorder()
    for value in (1.0, torch.tensor(5.0), 3.0):
        recorder.record("mean", value)
        recorder.record("sum", value, reduce="sum")
        recorder.record("max", value, reduce="max")
        recorder.record("last", value, reduce="last")
    assert recorder.flush() == {"mean": 3.0, "sum": 9.0, "max": 5.0, "last": 3.0}
    assert recorder.flush() == {}


def test_c42_counters_do_not_saturate_in_low_precision() -> None:
    """C42: bf16 counts 256 + 1 as 256 and fp32 2**24 + 1 as 2**24; the recorder counts right, integers as
    integers.
    """
    recorder = Recorder()
    for value in (256.0, 1.0):
        recorder.record("bf16", torch.tensor(value, dtype=torch.bfloat16), reduce="sum")
    for value in (2.0**24, 1.0):
        recorder.record("fp32", torch.tensor(value), reduce="sum")
    for value in (torch.tensor(2**53), 1, torch.tensor(1)):
        recorder.record("tokens", value, reduce="sum")
    flushed = recorder.flush()
    assert flushed == {"bf16": 257.0, "fp32": 2**24 + 1, "tokens": 2**53 + 2}
    assert isinstance(flushed["tokens"], int)


def test_a_tensor_is_not_fetched_before_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording costs no synchronisation: nothing reads a tensor's value, and all are fetched in one
    transfer.
    """
    fetches: list[int] = []
    original = torch.Tensor.tolist

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read while recording")

    def counted(tensor: torch.Tensor) -> object:
        fetches.append(tensor.numel())
        return original(tensor)

    for name in ("item", "__float__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    recorder = Recorder()
    for step in range(4):
        recorder.record("loss", torch.tensor(float(step), requires_grad=True) * 2)
        recorder.record("grad_norm", torch.tensor(float(step)), reduce="max")
    assert fetches == []
    assert recorder.flush() == {"loss": 3.0, "grad_norm": 3.0}
    assert fetches == [8]


def test_an_accumulator_changed_in_place_keeps_its_recorded_value() -> None:
    """A running sum that is reset after recording must not change what was recorded."""
    recorder, total = Recorder(), torch.tensor(7.0)
    recorder.record("loss", total)
    total.zero_()
    assert recorder.flush() == {"loss": 7.0}


@pytest.mark.parametrize(
    ("values", "reduce", "expected"),
    [
        ((1.0, math.nan), "max", math.nan),
        ((math.nan, 1.0), "max", math.nan),
        ((math.inf, -math.inf), "sum", math.nan),
        ((1.0, math.inf), "mean", math.inf),
    ],
)
def test_values_that_are_not_finite_show(values: tuple[float, ...], reduce: str, expected: float) -> None:
    """A NaN is never hidden by a reduction."""
    recorder = Recorder()
    for value in values:
        recorder.record("x", value, reduce=reduce)  # type: ignore[arg-type]
    assert recorder.flush()["x"] == pytest.approx(expected, nan_ok=True)


def test_what_cannot_be_recorded_is_refused() -> None:
    """Shapes, unknown reductions and a reduction that changes are errors that name the metric."""
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"metric loss: a tensor of shape \(2,\)"):
        recorder.record("loss", torch.zeros(2))
    with pytest.raises(ValueError, match="metric loss: reduce is 'median'"):
        recorder.record("loss", 1.0, reduce="median")  # type: ignore[arg-type]
    recorder.record("loss", 1.0)
    with pytest.raises(ValueError, match="recorded with reduce='mean' before"):
        recorder.record("loss", 1.0, reduce="sum")


def test_state_carries_a_started_interval_over_a_restart() -> None:
    """Promise 6: a checkpoint inside a logging interval does not change the line logged at its end."""
    recorder = Recorder()
    recorder.record("loss", torch.tensor(0.1))
    recorder.record("tokens", 7, reduce="sum")
    state = json.loads(json.dumps(recorder.state_dict()))
    resumed = Recorder()
    resumed.load_state_dict(state)
    for one in (recorder, resumed):
        one.record("loss", torch.tensor(0.3))
        one.record("tokens", 5, reduce="sum")
    assert resumed.flush() == recorder.flush()
