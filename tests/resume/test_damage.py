"""A checkpoint whose files have their sizes and other bytes than were written is not what a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint.checksums import verify
from meshtune.checkpoint.folder import read
from tests.resume.conftest import Bench
from tests.resume.faults import train_poisoned
from tests.resume.runs import checkpoint, lines, losses, manifest


def recipe_of(bench: Bench, **checkpoint: Any) -> dict[str, Any]:
    return bench.recipe(bench.model("llama"), checkpoint={"every_steps": 2, "keep": None, **checkpoint})


def folder_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"])


def flip(file: Path) -> None:
    """One bit in the middle of it."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 0x10]))


def trained(bench: Bench, world_size: int = 1, **checkpoint: Any) -> dict[str, Any]:
    """A recipe whose run has made ten steps and is to make two more."""
    recipe = recipe_of(bench, **checkpoint)
    assert bench.train(recipe, world_size).error is None
    recipe["training"]["max_steps"] = 12
    return recipe


@pytest.mark.parametrize(
    ("world_size", "asynchronous", "file"),
    [
        (1, False, "__0_0.distcp"),
        (1, True, ".metadata"),
        (1, False, "tensors.json"),
        (1, False, "manifest.json"),
        (2, True, "__0_0.distcp"),
        (2, False, "__1_0.distcp"),
    ],
)
def test_the_one_before_is_taken(bench: Bench, world_size: int, asynchronous: bool, file: str) -> None:
    """One flipped bit of any file, of any rank: said with file and step, and the course is that of a run from the one before."""
    recipe = trained(bench, world_size, asynchronous=asynchronous)
    run = folder_of(recipe)
    before = losses(run)
    for step in (8, 10):
        flip(checkpoint(run, step) / file)
    outcome = bench.train(recipe, world_size)
    assert outcome.error is None
    assert f"resuming    from {checkpoint(run, 6)}, after step 6" in outcome.said
    passed_over = [line for line in outcome.said.splitlines() if line.startswith("passed over")]
    for step, line in zip((10, 8), passed_over, strict=True):
        assert line.startswith(f"passed over {checkpoint(run, step)} is ") and file in line
    assert [row["step"] for row in lines(run)] == list(range(1, 13))
    assert {step: loss for step, loss in losses(run).items() if step <= 10} == pytest.approx(before, rel=0.2)
    assert not {8, 10, 12} - {int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")}
    for step in (8, 10, 12):
        verify(read(checkpoint(run, step)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_that_is_asked_for_by_name_is_refused(bench: Bench, world_size: int) -> None:
    recipe = trained(bench, world_size)
    run = folder_of(recipe)
    flip(checkpoint(run, 4) / "__0_0.distcp")
    recipe["checkpoint"]["resume"] = str(checkpoint(run, 4))
    before = lines(run)
    for outcome in bench.outcomes(recipe, world_size):
        assert outcome.error is not None and outcome.shared
        assert f"checkpoint.resume: {checkpoint(run, 4)} is damaged: __0_0.distcp does not hold" in outcome.error
    assert lines(run) == before, "nothing was changed for it"


def test_where_no_other_is_left_nothing_starts_anew_in_silence(bench: Bench) -> None:
    recipe = trained(bench, keep=1)
    flip(checkpoint(folder_of(recipe), 10) / "__0_0.distcp")
    error = bench.train(recipe).error
    assert error is not None
    assert "no complete checkpoint to resume from" in error and "step-10 is damaged: __0_0.distcp" in error


def test_a_rollback_passes_it_over(bench: Bench) -> None:
    """Each save is damaged as soon as it is made, but for the first: the run goes back to that one."""
    recipe = recipe_of(bench, every_steps=2)
    recipe["training"].update(max_steps=6, on_nonfinite="rollback")
    outcome = bench.ranks.call(1, train_on_a_bad_disk, recipe, bench.cache, 4)[0]
    assert outcome.error is None
    assert "rolled back to step 2" in outcome.said
    assert [row["step"] for row in lines(folder_of(recipe)) if "loss" in row] == [1, 2, 3, 4, 6]


def train_on_a_bad_disk(recipe: dict[str, Any], cache: str, bad: int) -> Any:
    """Train where the checkpoint of step `bad` is damaged when it is complete the first time, and step 5 fails."""
    from meshtune.checkpoint import folder

    publish, done = folder.publish, []

    def damaging(beside: Path, step: int, *rest: Any) -> Path:
        path = publish(beside, step, *rest)
        if step == bad and not done:
            flip(path / "__0_0.distcp")
            done.append(step)
        return path

    folder.publish = damaging
    try:
        return train_poisoned(recipe, cache, [5])
    finally:
        folder.publish = publish


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_rank_takes_the_checksum_of_what_it_writes(bench: Bench, asynchronous: bool) -> None:
    recipe = recipe_of(bench, asynchronous=asynchronous)
    recipe["training"]["max_steps"] = 2
    assert bench.train(recipe, 2).error is None
    path = checkpoint(folder_of(recipe), 2)
    assert set(manifest(path)["crc32"]) == {"__0_0.distcp", "__1_0.distcp", ".metadata", "tensors.json"}
    verify(read(path))
