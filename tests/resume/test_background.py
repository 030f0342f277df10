"""Checkpoints that are written while training goes on: the same bytes, nothing lost, no error swallowed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint import folder
from meshtune.checkpoint.background import Background
from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.recipes.recipe import Recipe
from tests.resume.conftest import Bench
from tests.resume.faults import train_on_a_full_disk, train_on_a_slow_disk
from tests.resume.runs import checkpoint, lines

STEPS = 6


def recipe_of(bench: Bench, asynchronous: bool = True, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    keeping = {"every_steps": 2, "keep": None, "asynchronous": asynchronous, **changes.pop("checkpoint", {})}
    recipe = bench.recipe(bench.model(architecture), checkpoint=keeping, **changes)
    recipe["training"]["max_steps"] = STEPS
    return recipe


def run_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"])


def files(path: Path) -> dict[str, bytes]:
    """All that torch writes, and the table of it; a manifest holds times that were measured."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != folder.MANIFEST}


@pytest.mark.parametrize(
    ("architecture", "world_size", "distributed"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"strategy": "fsdp2"}),
        ("llama", 2, {"strategy": "ddp"}),
        ("qwen3", 2, {"tp_size": 2}),
        ("qwen3", 2, {"pp_size": 2}),
        ("qwen3_moe", 2, {"ep_size": 2}),
    ],
    ids=["one", "fsdp2", "ddp", "tp", "pp", "ep"],
)
def test_every_byte_is_that_of_a_synchronous_one(
    bench: Bench, architecture: str, world_size: int, distributed: dict[str, Any]
) -> None:
    """Of shards, replicas, parts and stages, though the weights have moved on while they were written."""
    now, later = (recipe_of(bench, how, architecture, distributed=distributed) for how in (False, True))
    for recipe in (now, later):
        assert bench.train(recipe, world_size).error is None
    for step in (2, 4, 6):
        found, wanted = files(checkpoint(run_of(later), step)), files(checkpoint(run_of(now), step))
        assert found.keys() == wanted.keys() and ".metadata" in found
        assert [name for name in wanted if found[name] != wanted[name]] == []
    assert lines(run_of(later)) == lines(run_of(now))


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_meanwhile(bench: Bench, world_size: int) -> None:
    """Steps between begin and end of a save; the next save waits for it, and so does the end of the run."""
    recipe = recipe_of(bench, checkpoint={"every_steps": 3})
    outcome, happened = bench.ranks.call(world_size, train_on_a_slow_disk, recipe, bench.cache, 1.0)[0]
    assert outcome.error is None
    assert happened[happened.index("begin 3") + 1] == "step 4"
    assert happened.index("begin 3") < happened.index("step 4") < happened.index("end 3") < happened.index("begin 6")
    assert happened[-1] == "end 6"
    for step in (3, 6):
        assert f"saved {checkpoint(run_of(recipe), step)}" in outcome.said
    synchronous = recipe_of(bench, False, checkpoint={"every_steps": 3})
    _, happened = bench.ranks.call(world_size, train_on_a_slow_disk, synchronous, bench.cache, 0.1)[0]
    assert happened.index("end 3") < happened.index("step 4")


def test_never_two_at_once(bench: Bench) -> None:
    """A save that is due every step, on a disk that is slower than a step."""
    recipe = recipe_of(bench, checkpoint={"every_steps": 1})
    outcome, happened = bench.ranks.call(2, train_on_a_slow_disk, recipe, bench.cache, 0.2)[0]
    assert outcome.error is None
    saves = [word for word in happened if not word.startswith("step")]
    assert saves == [f"{word} {step}" for step in range(1, STEPS + 1) for word in ("begin", "end")]


def test_a_signal_waits_for_what_is_being_written(bench: Bench) -> None:
    """And for the checkpoint of its own step."""
    recipe = recipe_of(bench, checkpoint={"every_steps": 3})
    outcome, happened = bench.ranks.call(2, train_on_a_slow_disk, recipe, bench.cache, 0.5, 4)[0]
    assert outcome.stopped_after == 4
    assert happened[-1] == "end 4" and "end 3" in happened
    assert [c.step for c in folder.checkpoints(run_of(recipe))] == [3, 4]
    assert not list((run_of(recipe) / "checkpoints").glob(".*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_comes_up_at_the_next_step(bench: Bench, rank: int) -> None:
    """C71: on every rank, in the words of a synchronous one; the checkpoint before stands and the run goes on from it."""
    recipe = recipe_of(bench, checkpoint={"keep": 1})
    recipe["training"]["max_steps"] = 400
    outcomes = bench.ranks.call(2, train_on_a_full_disk, recipe, bench.cache, rank, "step-4.")
    for outcome in outcomes:
        assert outcome.error is not None and outcome.shared
        assert (
            f"{checkpoint(run_of(recipe), 4)} could not be written: rank {rank}: [Errno 28] No space left"
            in outcome.error
        )
    assert [path.name for path in (run_of(recipe) / "checkpoints").iterdir()] == ["step-2"]
    assert max(row["step"] for row in lines(run_of(recipe))) in (5, 6)
    recipe["training"]["max_steps"] = STEPS
    assert bench.train(recipe).error is None
    assert [row["step"] for row in lines(run_of(recipe))] == list(range(1, STEPS + 1))


def test_a_last_save_that_fails_fails_the_run(bench: Bench) -> None:
    recipe = recipe_of(bench)
    for outcome in bench.ranks.call(2, train_on_a_full_disk, recipe, bench.cache, 1, f"step-{STEPS}."):
        assert outcome.error is not None and outcome.shared
        assert f"step-{STEPS} could not be written" in outcome.error


def test_exports_beside_each_checkpoint_are_refused(bench: Bench) -> None:
    with pytest.raises(RecipeError, match="does not go with `export: all`"):
        from_mapping(Recipe, recipe_of(bench, checkpoint={"export": "all"}))


def test_an_error_of_the_background_comes_up_once() -> None:
    background, gate = Background(), threading.Event()

    def work() -> None:
        gate.wait(10)
        raise OSError("full")

    background.start(work)
    with pytest.raises(RuntimeError, match="has not been finished"):
        background.start(work)
    background.finish(0.01)
    assert not background.failed
    gate.set()
    with pytest.raises(OSError, match="full"):
        background.finish()
    assert not background.failed
    background.finish()
