"""Which checkpoints are made and kept: by the clock, and for the sake of a validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.recipes import assembly, saving
from meshtune.recipes.recipe import Recipe
from meshtune.training.step import TrainStep
from tests.resume.conftest import Bench
from tests.resume.runs import Outcome, tensors, train


def recipe_of(bench: Bench, **checkpoint: Any) -> dict[str, Any]:
    data = {"train_path": str(bench.train_path), "validation_path": str(bench.validation_path)}
    training = {"max_steps": 10, "eval_every_steps": 2}
    keeping = {"best_metric": "validation_loss", "keep": 1, **checkpoint}
    return bench.recipe(bench.model("llama"), data=data, training=training, checkpoint=keeping)


def kept(recipe: dict[str, Any]) -> list[str]:
    folder = Path(recipe["checkpoint"]["dir"]) / "checkpoints"
    return sorted((path.name for path in folder.glob("step-*")), key=lambda name: int(name[5:]))


def best_of(recipe: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(recipe["checkpoint"]["dir"]) / "checkpoints" / "best.json").read_text(encoding="utf-8"))


def train_validated(
    recipe: dict[str, Any], cache: str, values: Mapping[int, float], stop_after: int | None = None, rank: int = 0
) -> Outcome:
    """Train where the validation after step N has the loss `values[N]`, and an accuracy of its negative."""
    validate, call, done = assembly.validate, TrainStep.__call__, [0]

    def counted(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        done[0] = step + 1
        return call(self, batches, step, rate)

    def fixed(*arguments: Any) -> dict[str, float | int]:
        loss = values[done[0]]
        return {**validate(*arguments), "loss": loss, "token_accuracy": -loss}

    assembly.validate, TrainStep.__call__ = fixed, counted  # type: ignore[method-assign,assignment]
    try:
        return train(recipe, cache, stop_after, rank)
    finally:
        assembly.validate, TrainStep.__call__ = validate, call  # type: ignore[method-assign]


LOSSES = {0: 0.1, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 2.1}


def run(bench: Bench, recipe: dict[str, Any], values: Mapping[int, float] = LOSSES, *how: Any) -> Outcome:
    outcome = bench.ranks.call(2, train_validated, recipe, bench.cache, values, *how)[0]
    assert outcome.error is None
    return outcome


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_one_is_kept_beside_the_newest(bench: Bench, asynchronous: bool) -> None:
    """One better validation after the other is followed by a checkpoint; an equal one is not, nor that before the first step."""
    recipe = recipe_of(bench, asynchronous=asynchronous)
    said = run(bench, recipe).said
    assert [f"step-{n}" for n in range(11) if f"checkpoints/step-{n}\n" in said] == ["step-2", "step-4", "step-10"]
    assert kept(recipe) == ["step-4", "step-10"]
    assert best_of(recipe) == {"step": 4, "path": "step-4", "metric": "validation_loss", "value": 2.0}


def test_more_of_an_accuracy_is_better(bench: Bench) -> None:
    recipe = recipe_of(bench, best_metric="validation_token_accuracy", every_steps=3, keep=2)
    run(bench, recipe)
    assert kept(recipe) == ["step-4", "step-9", "step-10"]
    assert (best_of(recipe)["step"], best_of(recipe)["value"]) == (4, -2.0)


def test_nan_is_never_the_best(bench: Bench) -> None:
    recipe = recipe_of(bench)
    run(bench, recipe, {**LOSSES, 2: float("nan"), 4: 5.0, 6: float("nan"), 8: 5.0, 10: 5.0})
    assert best_of(recipe)["step"] == 4


def test_a_resumed_run_knows_the_best_one(bench: Bench) -> None:
    """Stopped where a better validation was due: it is made up for, and the checkpoint is the best one from then on."""
    recipe = recipe_of(bench)
    assert run(bench, recipe, LOSSES, 4).stopped_after == 4
    assert kept(recipe) == ["step-2", "step-4"] and best_of(recipe)["step"] == 2
    # The validation before the first step of this process is that of step 4.
    assert run(bench, recipe, {**LOSSES, 0: 2.0}, 7).stopped_after == 7
    assert kept(recipe) == ["step-4", "step-7"] and best_of(recipe)["step"] == 4
    run(bench, recipe)
    assert kept(recipe) == ["step-4", "step-10"] and best_of(recipe)["step"] == 4


def test_going_back_beyond_the_best_one_forgets_it(bench: Bench) -> None:
    recipe = recipe_of(bench, keep=None, every_steps=1)
    run(bench, recipe)
    back = {
        **recipe,
        "checkpoint": {**recipe["checkpoint"], "resume": str(Path(recipe["checkpoint"]["dir"]) / "checkpoints/step-3")},
    }
    run(bench, back, {4: 9.0, 6: 8.0, 8: 7.5, 10: 7.9, 0: 1.0})
    assert best_of(recipe) == {"step": 2, "path": "step-2", "metric": "validation_loss", "value": 3.0}


def test_another_metric_starts_anew(bench: Bench) -> None:
    """And without one there is no pointer to a best one."""
    recipe = recipe_of(bench, keep=None)
    run(bench, recipe)
    more = {**recipe, "training": {**recipe["training"], "max_steps": 12}}
    more["checkpoint"] = {**recipe["checkpoint"], "best_metric": "validation_perplexity"}
    run(bench, more, {**LOSSES, 12: 9.0})
    assert best_of(recipe)["step"] == 12 and best_of(recipe)["metric"] == "validation_perplexity"
    more["training"]["max_steps"], more["checkpoint"]["best_metric"] = 13, None
    run(bench, more, {**LOSSES, 12: 9.0, 13: 1.0})
    assert not (Path(recipe["checkpoint"]["dir"]) / "checkpoints" / "best.json").exists()


@pytest.mark.parametrize(
    "distributed",
    [{"strategy": "fsdp2"}, {"strategy": "ddp"}, {"tp_size": 2}, {"pp_size": 2}],
    ids=["fsdp2", "ddp", "tp", "pp"],
)
@pytest.mark.parametrize("best", [4, 10])
def test_the_best_weights_are_exported(bench: Bench, distributed: dict[str, Any], best: int) -> None:
    """From any layout, after a validation too: those of the checkpoint, whose step may be the last one."""
    recipe = recipe_of(bench, export="best", asynchronous=True)
    recipe["distributed"] = distributed
    said = run(bench, recipe, {**LOSSES, best: 1.0}).said
    folder = Path(recipe["checkpoint"]["dir"])
    assert f"the best checkpoint, {folder / 'checkpoints' / f'step-{best}'} (validation_loss 1)" in said
    assert best_of(recipe)["step"] == best
    stored, found = tensors(folder / "checkpoints" / f"step-{best}"), load_file(folder / "export" / "model.safetensors")
    assert found and all(torch.equal(tensor, stored[f"model.{name}"]) for name, tensor in found.items())


def test_a_finished_run_exports_the_best_weights_again(bench: Bench) -> None:
    """Run again, it has nothing to train, and writes what it wrote."""
    recipe = recipe_of(bench, export="best")
    run(bench, recipe)
    file = Path(recipe["checkpoint"]["dir"]) / "export" / "model.safetensors"
    before = file.read_bytes()
    file.unlink()
    assert "nothing to do" in run(bench, recipe).said
    assert file.read_bytes() == before


def test_no_best_one_to_export_is_said(bench: Bench) -> None:
    recipe = recipe_of(bench, export="best")
    nothing = dict.fromkeys(LOSSES, float("nan"))
    error = bench.ranks.call(2, train_validated, recipe, bench.cache, nothing)[0].error
    assert error is not None and "no validation of this run gave a validation_loss to compare" in error
    assert not (Path(recipe["checkpoint"]["dir"]) / "export").exists() and kept(recipe) == ["step-10"]


def test_exporting_the_best_needs_a_metric(bench: Bench) -> None:
    with pytest.raises(RecipeError, match=r"`best` needs checkpoint\.best_metric"):
        from_mapping(Recipe, recipe_of(bench, export="best", best_metric=None))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best_metric": "validation_los"}, "'validation_los' is no metric of a validation; there are validation_loss"),
        ({"best_metric": "loss"}, "is no metric of a validation"),
    ],
)
def test_a_metric_that_no_validation_has_is_refused(bench: Bench, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        from_mapping(Recipe, recipe_of(bench, **changes))


def test_names_of_sets_are_part_of_a_metrics_name(bench: Bench) -> None:
    recipe = recipe_of(bench, best_metric="validation_chat_loss")
    recipe["data"]["validation_path"] = {"chat": str(bench.validation_path), "code": str(bench.validation_path)}
    recipe["training"]["max_steps"] = 4
    assert bench.train(recipe, 2).error is None
    assert best_of(recipe)["metric"] == "validation_chat_loss"
    recipe["checkpoint"]["best_metric"] = "validation_loss"
    with pytest.raises(RecipeError, match="there are validation_chat_loss, validation_chat_perplexity"):
        from_mapping(Recipe, recipe)


def test_without_a_validation_there_is_no_best_one(bench: Bench) -> None:
    recipe = recipe_of(bench)
    recipe["data"].pop("validation_path")
    recipe["training"].pop("eval_every_steps")
    with pytest.raises(RecipeError, match="has no effect without a validation set"):
        from_mapping(Recipe, recipe)


def train_by_the_clock(recipe: dict[str, Any], cache: str, seconds_of_a_step: float) -> Outcome:
    """Train where each step takes so long by the clock of this rank."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock, call, time = Clock(), TrainStep.__call__, saving.time

    def counted(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        clock.now += seconds_of_a_step
        return call(self, batches, step, rate)

    saving.time, TrainStep.__call__ = clock, counted  # type: ignore[method-assign,assignment]
    try:
        return train(recipe, cache)
    finally:
        saving.time, TrainStep.__call__ = time, call  # type: ignore[method-assign]


@pytest.mark.parametrize(("every_steps", "steps"), [(None, [3, 6, 9, 10]), (4, [3, 4, 7, 8, 10])])
def test_a_checkpoint_by_the_clock(bench: Bench, every_steps: int | None, steps: list[int]) -> None:
    """Half a minute after the last one, whatever that was for, at steps of ten seconds; rank 1's clock does not matter."""
    recipe = recipe_of(bench, best_metric=None, keep=None, every_minutes=0.5, every_steps=every_steps)
    assert bench.ranks.call(2, train_by_the_clock, recipe, bench.cache, 10.0)[0].error is None
    assert kept(recipe) == [f"step-{step}" for step in steps]
