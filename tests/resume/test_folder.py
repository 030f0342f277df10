"""The checkpoints of a run folder: which are complete, what a killed save leaves, what may go, and who holds it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from meshtune.checkpoint import folder
from meshtune.checkpoint.lock import RunLock
from meshtune.errors import CheckpointError
from meshtune.recipes.folder import add_to_layout


def write(run: Path, step: int, content: bytes = b"weights") -> Path:
    """A complete checkpoint, by the steps in which a run writes it."""
    beside = folder.begin(run, step)
    (beside / "__0_0.distcp").write_bytes(content)
    (beside / ".metadata").write_bytes(b"names")
    return folder.publish(beside, step, {"state": {"step": step}})


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    """C70: until its manifest is written and it is renamed, nobody takes it for one."""
    beside = folder.begin(tmp_path, 4)
    (beside / "__0_0.distcp").write_bytes(b"weights")
    assert folder.newest(tmp_path) is None
    path = folder.publish(beside, 4, {"data": "abc"})
    newest = folder.newest(tmp_path)
    assert newest is not None
    assert (newest.path, newest.step, newest.manifest["data"]) == (path, 4, "abc")
    assert newest.manifest["files"] == {"__0_0.distcp": 7}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing, its manifest says 7 bytes"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b"wei"), "__0_0.distcp has 3 bytes, its manifest says 7"),
        (lambda path: (path / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"format"', encoding="utf-8"), "is not JSON"),
        (lambda path: (path / "manifest.json").write_text("[]", encoding="utf-8"), "format"),
        (lambda path: (path / "manifest.json").write_text('{"format": 99}', encoding="utf-8"), "format 99"),
    ],
)
def test_a_damaged_one_is_passed_over_and_refused_by_name(tmp_path: Path, damage: object, says: str) -> None:
    """C70: the newest complete one is taken; the damaged one, asked for, says what is wrong with it."""
    write(tmp_path, 2)
    newest = write(tmp_path, 4)
    damage(newest)  # type: ignore[operator]
    found = folder.newest(tmp_path)
    assert found is not None
    assert found.step == 2
    with pytest.raises(CheckpointError, match=says):
        folder.read(newest)
    assert len(folder.survey(tmp_path)[1]) == 1


def test_what_is_no_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for name in ("step-9.bak", "step-x", "notes", ".step-9.superseded"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert [c.step for c in folder.checkpoints(tmp_path)] == [2]
    assert folder.survey(tmp_path)[1] == []


def test_a_step_that_is_reached_again_is_rewritten(tmp_path: Path) -> None:
    """C70."""
    write(tmp_path, 4, b"first")
    path = write(tmp_path, 4, b"again!")
    assert (path / "__0_0.distcp").read_bytes() == b"again!"
    assert names(tmp_path) == {"step-4"}


def test_a_process_killed_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The old checkpoint has made room, and the new one has not got its name yet."""
    path = write(tmp_path, 4, b"first")
    path.rename(path.with_name(".step-4.old"))
    (folder.begin(tmp_path, 4) / "__0_0.distcp").write_bytes(b"again!")
    (tmp_path / ".metrics.jsonl.4711.tmp").touch()
    folder.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoints"]
    assert names(tmp_path) == {"step-4"}
    assert (path / "__0_0.distcp").read_bytes() == b"first"


def test_two_attempts_at_one_step_never_share_a_folder(tmp_path: Path) -> None:
    """A rank of a dying run may still write; it must not write into the checkpoint of the run after it."""
    assert folder.begin(tmp_path, 4) != folder.begin(tmp_path, 4)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    folder.retain(tmp_path, None)
    assert names(tmp_path) == {"step-2", "step-4", "step-6", "step-8"}
    folder.retain(tmp_path, 2)
    assert names(tmp_path) == {"step-6", "step-8"}


def test_a_course_that_is_given_up_is_neither_newest_nor_in_the_way(tmp_path: Path) -> None:
    """Going back to step 2, retention would otherwise remove step 3 for the sake of steps 4 and 6."""
    for step in (2, 4, 6):
        write(tmp_path, step)
    moved = folder.set_aside(tmp_path, 2)
    assert [path.name for path in moved] == [".step-4.superseded", ".step-6.superseded"]
    write(tmp_path, 3)
    folder.retain(tmp_path, 1)
    assert names(tmp_path) == {"step-3", ".step-4.superseded", ".step-6.superseded"}


def test_two_runs_never_hold_one_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        holder = json.loads((tmp_path / ".lock").read_text(encoding="utf-8"))
        with (
            pytest.raises(CheckpointError, match=rf"in use by another run \(process {holder['pid']} on"),
            RunLock(tmp_path, patience=0.3),
        ):
            pass
    with RunLock(tmp_path, patience=0.0):
        pass


def test_a_run_waits_for_one_that_is_just_ending(tmp_path: Path) -> None:
    dying = RunLock(tmp_path)
    dying.__enter__()
    start = time.monotonic()
    threading.Timer(0.5, dying.__exit__, (None, None, None)).start()
    with RunLock(tmp_path, patience=20.0):
        assert 0.4 < time.monotonic() - start < 15.0


def test_facts_that_cannot_be_written_are_an_error_of_the_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        add_to_layout(tmp_path, {"trained_parameters": 1})
