"""The last step of a run is in metrics.jsonl, also where it lies inside a logging interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.resume.conftest import Bench
from tests.resume.faults import train_poisoned
from tests.resume.runs import lines


def recipe_of(bench: Bench, every_steps: int, max_steps: int = 10, **changes: Any) -> dict[str, Any]:
    logging = {"progress": "plain", "every_steps": every_steps}
    recipe = bench.recipe(bench.model("llama"), logging=logging, **changes)
    # A constant rate: a run that is made longer then does what the long one did.
    recipe["training"]["max_steps"], recipe["lr_scheduler"] = max_steps, {"name": "constant"}
    return recipe


def rows(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return lines(Path(recipe["checkpoint"]["dir"]))


def steps(recipe: dict[str, Any]) -> list[int]:
    return [row["step"] for row in rows(recipe)]


@pytest.fixture(scope="module")
def each(bench: Bench) -> dict[int, dict[str, Any]]:
    """A line for every one of fourteen steps."""
    recipe = recipe_of(bench, 1, 14)
    assert bench.train(recipe).error is None
    return {row["step"]: row for row in rows(recipe)}


def check(found: list[dict[str, Any]], each: dict[int, dict[str, Any]]) -> None:
    """Each line tells of the steps since the line before it: every step in one of them."""
    before = 0
    for row in found:
        parts = [each[step] for step in range(before + 1, row["step"] + 1)]
        for name in ("tokens", "supervised_tokens"):
            assert row[name] == sum(part[name] for part in parts)
        loss = sum(part["loss"] * part["supervised_tokens"] for part in parts) / row["supervised_tokens"]
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(parts[-1]["grad_norm"], rel=1e-6)
        assert row["learning_rate"] == parts[-1]["learning_rate"]
        before = row["step"]


@pytest.mark.parametrize(("every_steps", "wanted"), [(4, [4, 8, 10]), (5, [5, 10]), (3, [3, 6, 9, 10]), (100, [10])])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_step_is_logged(
    bench: Bench, each: dict[int, dict[str, Any]], world_size: int, every_steps: int, wanted: list[int]
) -> None:
    recipe = recipe_of(bench, every_steps)
    assert bench.train(recipe, world_size).error is None
    assert steps(recipe) == wanted
    check(rows(recipe), each)


@pytest.mark.parametrize("stop_after", [6, 8, 9])
def test_a_resumed_run_logs_the_same_lines(bench: Bench, stop_after: int) -> None:
    """Stopped inside an interval, at its end, and inside the last one: an interval goes on, and no line is there twice."""
    whole, parts = recipe_of(bench, 4), recipe_of(bench, 4)
    assert bench.train(whole).error is None
    assert bench.train(parts, stop_after=stop_after).stopped_after == stop_after
    assert steps(parts) == [step for step in (4, 8) if step <= stop_after]
    assert bench.train(parts).error is None
    assert rows(parts) == rows(whole)
    assert "nothing to do" in bench.train(parts).said
    assert rows(parts) == rows(whole)


def test_a_run_that_is_made_longer(bench: Bench, each: dict[int, dict[str, Any]]) -> None:
    """The line of what was the last step stays, and the next one begins after it."""
    recipe = recipe_of(bench, 4)
    assert bench.train(recipe).error is None
    recipe["training"]["max_steps"] = 14
    assert bench.train(recipe).error is None
    assert steps(recipe) == [4, 8, 10, 12, 14]
    check(rows(recipe), each)


def test_a_last_step_that_is_skipped(bench: Bench, each: dict[int, dict[str, Any]]) -> None:
    """The line of the last step tells of those of its interval that were taken; where none was, there is none."""
    recipe = recipe_of(bench, 4)
    recipe["training"]["on_nonfinite"] = "skip"
    assert bench.ranks.call(1, train_poisoned, recipe, bench.cache, [10])[0].error is None
    assert [(row["step"], "skipped" in row) for row in rows(recipe)] == [
        (4, False),
        (8, False),
        (10, True),
        (10, False),
    ]
    assert rows(recipe)[-1]["tokens"] == each[9]["tokens"]
    alone = recipe_of(bench, 3)
    alone["training"]["on_nonfinite"] = "skip"
    assert bench.ranks.call(1, train_poisoned, alone, bench.cache, [10])[0].error is None
    assert [(row["step"], "skipped" in row) for row in rows(alone)][-2:] == [(9, False), (10, True)]
