"""Metrics files: valid JSON, full precision, steps that only go up, resumed runs that join up (C28)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshtune.errors import MeshtuneError
from meshtune.observe import JSONLSink, LoggingSection, TensorBoardSink


def rows(path: Path) -> list[dict]:
    """The file's lines, read as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def run(path: Path, resume_step: int | None, last: int) -> None:
    """Log the steps after `resume_step` up to `last`, a validation at each third."""
    sink = JSONLSink(path, resume_step=resume_step)
    for step in range((resume_step or 0) + 1, last + 1):
        sink.write(step, {"epoch": step / 10, "loss": 1 / step, "tokens": 128})
        if step % 3 == 0:
            sink.write(step, {"epoch": step / 10, "validation_loss": 2 / step, "validation_tokens": 64})
    sink.close()


def test_numbers_round_trip_and_are_valid_json(tmp_path: Path) -> None:
    """Full precision: what is read equals what was written; NaN and infinities are null, integers stay
    integers.
    """
    sink = JSONLSink(tmp_path / "run" / "metrics.jsonl")
    values = {"loss": 0.1 + 0.2, "learning_rate": 1e-5 / 3, "tokens": 2**60, "mfu": None}
    sink.write(1, {**values, "grad_norm": math.nan, "up": math.inf, "down": -math.inf})
    # Read before close: each line is flushed when written.
    (row,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert row == {"step": 1, **values, "grad_norm": None, "up": None, "down": None}
    assert isinstance(row["tokens"], int)
    assert next(iter(row)) == "step"
    sink.close()
    sink.close()


def test_c28_a_resumed_run_joins_up(tmp_path: Path) -> None:
    """C28: killed at step 8 in the middle of a line, resumed from the checkpoint of step 6, also twice: same
    file.
    """
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    run(whole, 0, 12)
    run(broken, 0, 8)
    broken.write_bytes(broken.read_bytes() + b'{"step": 9, "epo')
    run(broken, 6, 10)
    run(broken, 9, 12)
    assert broken.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [broken, whole]


@pytest.mark.parametrize("torn", [b'{"step": 4', b'{"step": 4, "loss": 1.0}garbage', b"\x00\x00\xff", b"[4]\n", b"4"])
def test_c28_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """A line cut by a kill never makes the next one unreadable, with or without a resume step."""
    for resume_step in (3, None):
        path = tmp_path / f"{resume_step}.jsonl"
        run(path, 0, 3)
        path.write_bytes(path.read_bytes() + torn)
        sink = JSONLSink(path, resume_step=resume_step)
        sink.write(4, {"loss": 0.5})
        sink.close()
        assert [row["step"] for row in rows(path)] == [1, 2, 3, 3, 4]


def test_a_whole_last_line_without_its_line_break_is_kept(tmp_path: Path) -> None:
    """A kill between the line and its line break loses no step."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}')
    sink = JSONLSink(path, resume_step=1)
    sink.write(2, {"loss": 1.5})
    sink.close()
    assert rows(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    """One run per job: resume step 0 leaves nothing of an earlier run, its validation before the first step
    included.
    """
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "validation_loss": 3.0}\n{"step": 1, "loss": 2.0}\n', encoding="utf-8")
    JSONLSink(path, resume_step=0).close()
    assert path.read_bytes() == b""


def test_steps_only_go_up(tmp_path: Path) -> None:
    """C28: a step before the last one is an error, also against lines that were there before."""
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 3)
    sink = JSONLSink(path)
    with pytest.raises(ValueError, match="step 2 comes after step 3"):
        sink.write(2, {"loss": 1.0})
    sink.close()


def test_tensorboard_gets_the_same_numbers_and_joins_up(tmp_path: Path) -> None:
    """Training and validation apart, unknown values left out, steps after the resumed checkpoint replaced."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path, resume_step=0)
    for step in (1, 2, 3):
        first.write(step, {"epoch": 0.1, "loss": float(step), "mfu": None})
    first.write(2, {"epoch": 0.1, "validation_loss": 9.0, "validation_tokens": 64})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=2)
    second.write(3, {"loss": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]} == {
        "train/epoch": [(step, pytest.approx(0.1)) for step in (1, 2, 3)][:2],
        "train/loss": [(1, 1.0), (2, 2.0), (3, 30.0)],
        "validation/loss": [(2, 9.0)],
        "validation/tokens": [(2, 64.0)],
    }


def test_a_missing_tensorboard_is_named_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 4: asked for and not installed is an error that says what to install."""
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run_dir = tmp_path / "run"
    with pytest.raises(MeshtuneError, match=r"pip install meshtune\[tensorboard\]"):
        LoggingSection(tensorboard=True).build_sinks(run_dir, resume_step=0)
    assert not run_dir.exists()


def test_the_section_builds_the_sinks_asked_for(tmp_path: Path) -> None:
    """Promise 3: each key of the section changes something."""
    (jsonl,) = LoggingSection().build_sinks(tmp_path, resume_step=0)
    jsonl.write(1, {"loss": 1.0})
    jsonl.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    pytest.importorskip("tensorboard")
    sinks = LoggingSection(tensorboard=True).build_sinks(tmp_path, resume_step=1)
    for sink in sinks:
        sink.close()
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"progress": "fancy"}, {"tensorbord": True}])
def test_the_section_is_strict(wrong: dict) -> None:
    """Promise 3: bounds, choices and unknown keys are checked."""
    with pytest.raises(ValidationError):
        LoggingSection(**wrong)
