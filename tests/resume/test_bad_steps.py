"""A step that is not finite, or whose loss stands out: stop, skip it, or roll back; the same on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.resume.conftest import Bench
from tests.resume.faults import train_poisoned
from tests.resume.runs import Outcome, checkpoint, lines, losses, manifest, tensors

STEPS = 10


def recipe_of(bench: Bench, training: dict[str, Any], **changes: Any) -> dict[str, Any]:
    training = {"max_steps": STEPS, "global_batch_size": 4, "precision": "fp32", "learning_rate": 0.02, **training}
    return bench.recipe(bench.model("llama"), training=training, **changes)


def run_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"])


def poison(bench: Bench, recipe: dict[str, Any], world_size: int, steps: list[int], *how: Any) -> list[Outcome]:
    return bench.ranks.call(world_size, train_poisoned, recipe, bench.cache, steps, *how)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in lines(run) if name in row]


def rows_of(run: Path, step: int) -> Any:
    return [row["rows"] for row in events(run, "skipped") if row["step"] == step]


@pytest.mark.parametrize(
    ("world_size", "rank", "distributed"),
    [(1, None, {}), (2, 1, {"strategy": "ddp"}), (2, 0, {"strategy": "fsdp2"}), (2, 1, {"pp_size": 2})],
    ids=["one", "ddp", "fsdp2", "pp"],
)
def test_a_step_that_is_not_finite_is_skipped(
    bench: Bench, world_size: int, rank: int | None, distributed: dict[str, Any]
) -> None:
    """Also where one rank alone sees it. Weights and moments stay as they were, the step counts, its rows are named, and
    the learning rate goes on."""
    recipe = recipe_of(
        bench, {"on_nonfinite": "skip"}, distributed=distributed, checkpoint={"every_steps": 1, "keep": 4}
    )
    recipe["training"]["max_steps"] = 5
    for outcome in poison(bench, recipe, world_size, [4], "nan", rank):
        assert outcome.error is None
    run = run_of(recipe)
    before, after = tensors(checkpoint(run, 3)), tensors(checkpoint(run, 4))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    later = tensors(checkpoint(run, 5))
    assert not all(torch.equal(later[name], after[name]) for name in after if name.startswith("model."))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in later.values())
    assert sorted(losses(run)) == [1, 2, 3, 5]
    (event,) = events(run, "skipped")
    assert event["step"] == 4
    assert event["skipped"].endswith(("gradient norm nan", "the figures of another rank are not finite"))
    assert len(event["rows"]) == 4 and len(set(event["rows"])) == 4
    state = manifest(checkpoint(run, 5))["state"]
    assert (state["step"], state["loader"]) == (5, {"epoch": 0, "units": 20})


def test_a_skip_is_told(bench: Bench) -> None:
    recipe = recipe_of(bench, {"on_nonfinite": "skip"})
    (outcome,) = poison(bench, recipe, 1, [2])
    assert "WARNING: step 2 was skipped: loss is " in outcome.said and "(rows " in outcome.said
    for line in (run_of(recipe) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert (run_of(recipe) / "report.html").is_file()


@pytest.mark.parametrize(
    ("kind", "training"),
    [("nan", {}), ("spike", {"on_loss_spike": "stop", "spike_window": 8})],
)
def test_stopping_names_the_step_and_changes_nothing(bench: Bench, kind: str, training: dict[str, Any]) -> None:
    recipe = recipe_of(bench, training, checkpoint={"every_steps": 3})
    for outcome in poison(bench, recipe, 2, [7], kind):
        assert outcome.error is not None
        assert outcome.shared
        assert outcome.error.startswith("TrainingError: step 7: loss ")
        assert "no weight was changed by this step" in outcome.error
    assert [path.name for path in sorted((run_of(recipe) / "checkpoints").iterdir())] == ["step-3", "step-6"]


def test_a_spike_is_skipped_and_no_other_step_is(bench: Bench) -> None:
    recipe = recipe_of(bench, {"on_loss_spike": "skip", "spike_window": 8, "spike_threshold": 20.0})
    assert poison(bench, recipe, 2, [6], "spike")[0].error is None
    (event,) = events(run_of(recipe), "skipped")
    assert event["step"] == 6 and "is a spike: the losses before it allow" in event["skipped"]
    assert max(losses(run_of(recipe)).values()) < 10


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("distributed", [{"strategy": "ddp"}, {"strategy": "fsdp2"}], ids=["ddp", "fsdp2"])
def test_rolling_back_skips_the_step_on_the_way_again(
    bench: Bench, distributed: dict[str, Any], asynchronous: bool
) -> None:
    """The course is that of a run that skips the step, to the last bit, and metrics.jsonl reads as if it had not been done
    twice."""
    changes = {"distributed": distributed, "data": {"validation_path": str(bench.validation_path)}}
    keeping = {"every_steps": 3, "keep": None, "asynchronous": asynchronous}
    rolled, skipped = (
        recipe_of(bench, {"on_nonfinite": policy, "eval_every_steps": 4}, checkpoint=dict(keeping), **changes)
        for policy in ("rollback", "skip")
    )
    outcome = poison(bench, rolled, 2, [5, 9], "nan", 1)[0]
    assert outcome.error is None
    assert "WARNING: step 5: " in outcome.said and "; rolled back to step 3, and will skip it" in outcome.said
    assert poison(bench, skipped, 2, [5, 9], "nan", 1)[0].error is None
    found, wanted = run_of(rolled), run_of(skipped)
    assert losses(found) == losses(wanted)
    assert [row["step"] for row in lines(found)] == sorted(row["step"] for row in lines(found))
    assert [(row["step"], row["rolled_back_from"]) for row in events(found, "rolled_back_from")] == [(3, 5), (6, 9)]
    assert rows_of(found, 5) == rows_of(wanted, 5) and rows_of(found, 9) == rows_of(wanted, 9)
    state, reference = tensors(checkpoint(found, STEPS)), tensors(checkpoint(wanted, STEPS))
    assert all(torch.equal(state[name], reference[name]) for name in reference)


def test_a_resumed_run_knows_the_steps_that_were_bad(bench: Bench) -> None:
    """Rolled back from 5, it saves at 6; going back to step 3 by hand, or on from 6, none of it is trained on."""
    recipe = recipe_of(bench, {"on_nonfinite": "rollback", "max_steps": 6}, checkpoint={"every_steps": 3})
    assert poison(bench, recipe, 1, [5])[0].error is None
    assert manifest(checkpoint(run_of(recipe), 6))["state"]["guard"]["bad"][0][0] == 5


def test_too_many_bad_steps_stop_the_run(bench: Bench) -> None:
    recipe = recipe_of(bench, {"on_nonfinite": "skip", "max_bad_steps": 2})
    for outcome in poison(bench, recipe, 2, [2, 4, 5, 6]):
        assert outcome.error is not None and outcome.shared
        assert outcome.error.startswith("TrainingError: step 5: loss is ")
        assert "training.max_bad_steps is 2" in outcome.error


def test_there_is_nothing_to_roll_back_to_before_the_first_checkpoint(bench: Bench) -> None:
    recipe = recipe_of(bench, {"on_nonfinite": "rollback"}, checkpoint={"every_steps": 5})
    for outcome in poison(bench, recipe, 2, [3]):
        assert outcome.error is not None
        assert "to roll back to yet; save earlier" in outcome.error
