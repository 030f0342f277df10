"""A run that was stopped and resumed is the run that was not: every line, every tensor, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.resume.conftest import STEPS_PER_EPOCH, Bench
from tests.resume.runs import checkpoint, lines, manifest, tensors

STEPS = 10


def resumed(bench: Bench, recipe: dict[str, Any], stops: list[int], world_size: int = 1) -> Path:
    """Run with a stop after each of `stops`; the run folder."""
    for stop in stops:
        assert bench.train(recipe, world_size, stop).stopped_after == stop
    outcome = bench.train(recipe, world_size)
    assert outcome.error is None and outcome.stopped_after is None
    return Path(recipe["checkpoint"]["dir"])


def assert_same_course(found: Path, wanted: Path) -> None:
    assert lines(found) == lines(wanted)
    last, reference = checkpoint(found, STEPS), checkpoint(wanted, STEPS)
    assert state_of(last) == state_of(reference)
    state, whole = tensors(last), tensors(reference)
    assert state.keys() == whole.keys()
    different = [name for name in whole if not torch.equal(state[name], whole[name])]
    assert not different


def state_of(path: Path) -> dict[str, Any]:
    """Step, counts, data cursor and the logging interval that has begun, without what is measured."""
    state = manifest(path)["state"]
    for measured in ("seconds", "data_wait"):
        state["recorded"].pop(measured, None)
    return state


def dropout_recipe(bench: Bench, packing: bool, **changes: dict[str, Any]) -> dict[str, Any]:
    """Dropout in attention and residuals, validations, and a logging interval that no stop falls on the end of."""
    data = {"train_path": str(bench.train_path), "max_seq_length": 40, "packing": packing}
    return bench.recipe(
        bench.with_dropout(),
        data={**data, "validation_path": str(bench.validation_path)},
        training={"max_steps": STEPS, "global_batch_size": 2 if packing else 4, "eval_every_steps": 4},
        logging={"every_steps": 3, "progress": "none"},
        **changes,
    )


@pytest.fixture(scope="module")
def straight(bench: Bench) -> dict[bool, Path]:
    """The run folders of uninterrupted runs, packed or not."""
    return {packing: resumed(bench, dropout_recipe(bench, packing), []) for packing in (False, True)}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stops", [[5], [3, 7], [4, STEPS_PER_EPOCH]])
def test_one_process(bench: Bench, straight: dict[bool, Path], stops: list[int], packing: bool) -> None:
    """C45, C67, C68: mid-epoch, twice, with validation due at the stop (4), and just at the border of an epoch (6)."""
    recipe = dropout_recipe(bench, packing)
    assert_same_course(resumed(bench, recipe, stops), straight[packing])


@pytest.mark.parametrize(
    "setting", [("strategy", "fsdp2"), ("strategy", "ddp"), ("tp_size", 2), ("pp_size", 2)], ids=str
)
def test_two_ranks(bench: Bench, setting: tuple[str, Any]) -> None:
    """C68: each rank draws its own dropout, and goes on drawing it after a resume."""
    recipes = [dropout_recipe(bench, packing=False, distributed=dict([setting])) for _ in range(2)]
    assert_same_course(resumed(bench, recipes[0], [5], world_size=2), resumed(bench, recipes[1], [], world_size=2))


def test_dropout_was_at_work(bench: Bench, straight: dict[bool, Path]) -> None:
    """The comparison above would be idle if the dropout of the model's config did nothing."""
    recipe = dropout_recipe(bench, packing=False)
    recipe["model"]["name"] = str(bench.model("gpt2"))
    assert lines(resumed(bench, recipe, [])) != lines(straight[False])


def test_sgd_with_momentum_and_weights_held_in_bf16(bench: Bench) -> None:
    """What is stored has the dtype that trains: bf16 weights and a bf16 momentum come back to the bit."""
    changes: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "training": {"precision": "bf16"},
    }
    recipes = [bench.recipe(bench.model("llama"), **changes) for _ in range(2)]
    found, wanted = resumed(bench, recipes[0], [5]), resumed(bench, recipes[1], [])
    assert_same_course(found, wanted)
    assert {t.dtype for t in tensors(checkpoint(found, STEPS)).values()} == {torch.bfloat16}
