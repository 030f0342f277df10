"""What validation says: for each named set, of a plain transformers forward, and as often as it was asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.conftest import Bench
from tests.parity.reference import token_losses
from tests.parity.runs import TOLERANCE, records

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"strategy": "ddp"}),
    (2, {"tp_size": 2}),
    (2, {"cp_size": 2}),
    (2, {"pp_size": 2}),
]


@torch.no_grad()
def plain_scores(bench: Bench, folder: Path, name: str) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses, right = [], []
    for row in bench.rows(name):
        losses.append(token_losses(model, [row]))
        ids = torch.tensor([row.ids])
        likeliest = model(input_ids=ids).logits[0, :-1].argmax(-1)
        right.append((likeliest == ids[0, 1:])[torch.tensor(row.supervised[1:])])
    loss, found = torch.cat(losses).mean().item(), torch.cat(right).float()
    return {"loss": loss, "perplexity": math.exp(loss), "token_accuracy": found.mean().item(), "tokens": len(found)}


@pytest.mark.parametrize(("world_size", "distributed"), LAYOUTS, ids=["1", "ddp2", "tp2", "cp2", "pp2"])
def test_each_named_set_has_its_own_metrics(bench: Bench, world_size: int, distributed: dict[str, Any]) -> None:
    """A mean over tokens, the exponential of it, and how many tokens are the likeliest ones: C40."""
    paths = {name: str(bench.folder / f"{name}.jsonl") for name in ("train", "validation")}
    recipe = bench.recipe(
        bench.model("llama"),
        packed=True,
        distributed=distributed,
        training={"per_device_batch_size": 2, "learning_rate": 0.02},
    )
    recipe["data"]["validation_path"] = paths
    bench.train(world_size, recipe)
    last = records(recipe, "validation_train_loss")[-1]
    assert "validation_loss" not in last
    for name in paths:
        wanted = plain_scores(bench, Path(recipe["checkpoint"]["dir"]) / "export", name)
        assert 0 < wanted["token_accuracy"] < 1
        found = {key: last[f"validation_{name}_{key}"] for key in wanted}
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_it_runs_when_it_is_asked_for(bench: Bench) -> None:
    """31 rows, 4 a step: 8 steps an epoch. Half an epoch is over after steps 4, 8, 12; every 3 steps beside."""
    recipe = bench.recipe(
        bench.model("llama"),
        training={"max_steps": 13, "global_batch_size": 4, "eval_every_epochs": 0.5, "eval_every_steps": 6},
        checkpoint={"export": "none"},
    )
    bench.train(1, recipe)
    assert [row["step"] for row in records(recipe, "validation_loss")] == [0, 4, 6, 8, 12, 13]
