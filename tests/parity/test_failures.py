"""A loss or gradient that is not finite is caught on every rank before the optimizer touches a weight."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtune.errors import TrainingError
from meshtune.models.causal_lm import CausalLM
from tests.parity.conftest import Bench
from tests.parity.runs import TOLERANCE, digests, train_watched

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp": (4, {"dp_replicate_size": 2}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
}


def train_until_it_fails(recipe: dict[str, Any], cache: str) -> tuple[str, bool]:
    """The TrainingError of this rank, and whether its weights are those from before the step."""
    models: list[CausalLM] = []
    before: dict[str, str] = {}

    def started(model: CausalLM) -> None:
        models.append(model)
        before.update(digests(model))

    with pytest.raises(TrainingError) as caught:
        train_watched(recipe, cache, started)
    return str(caught.value), digests(models[0]) == before


def poison_a_weight(model: nn.Module) -> None:
    model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.inf


def poison_the_letter_z(model: nn.Module) -> None:
    """Only a row with that letter has a loss that is not finite."""
    model.model.embed_tokens.weight[4 + ord("z") - ord("!")] = torch.nan


def overflow_the_norm(model: nn.Module) -> None:
    """The head's input is as large as its weight is small: logits are as before, and the square of its gradient
    overflows."""
    model.model.norm.weight.mul_(1e20)
    model.lm_head.weight.mul_(1e-20)


def check(bench: Bench, recipe: dict[str, Any], world_size: int, loss: float) -> None:
    answers = bench.ranks.call(world_size, train_until_it_fails, recipe, bench.cache)
    for message, unchanged in answers:
        found = re.match(r"step 1: loss is (\S+), gradient norm (\S+); no weight was changed", message)
        assert found is not None, message
        assert float(found[1]) == pytest.approx(loss, rel=TOLERANCE, nan_ok=True)
        assert not math.isfinite(float(found[2]))
        assert unchanged
    assert not list(Path(recipe["checkpoint"]["dir"]).glob("checkpoints/step-*"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_that_is_not_finite_stops_every_rank(bench: Bench, layout: str) -> None:
    """A weight is infinite, so every loss is NaN."""
    world_size, distributed = LAYOUTS[layout]
    recipe = bench.recipe(bench.model("llama", "infinite", poison_a_weight), distributed=distributed)
    check(bench, recipe, world_size, math.nan)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_a_loss_that_is_not_finite_on_one_rank_stops_every_rank(bench: Bench, layout: str) -> None:
    """The last row of the batch, which the last rank reads, is the only one with a poisoned token."""
    world_size, distributed = LAYOUTS[layout]
    bench.add("one-z", [[("user", letter), ("assistant", letter * 3)] for letter in "abcdefghijkz"])
    recipe = bench.recipe(
        bench.model("llama", "z", poison_the_letter_z),
        data="one-z",
        distributed=distributed,
        training={"per_device_batch_size": 12 // world_size},
    )
    del recipe["data"]["validation_path"]
    check(bench, recipe, world_size, math.nan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_norm_that_is_not_finite_stops_every_rank(bench: Bench, layout: str) -> None:
    """The loss is finite, and every gradient is; their norm is not."""
    world_size, distributed = LAYOUTS[layout]
    recipe = bench.recipe(bench.model("llama", "overflow", overflow_the_norm), distributed=distributed)
    check(bench, recipe, world_size, bench.plain("llama", packed=False).loss[0])
