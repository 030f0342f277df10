"""Case C52: what all ranks of a tensor-parallel group hold loses the same elements, what each holds a part of loses its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshtune.models.adapters import variant
from meshtune.models.adapters.dropout import drop
from tests.parity.conftest import Bench
from tests.parity.meshes import TP
from tests.parity.runs import digests, records, train_watched


def train_recorded(recipe: dict[str, Any], cache: str) -> tuple[list[tuple[bool, Tensor]], dict[str, str]]:
    """On a rank: of each dropout whether its input is this rank's own, and what it has taken away; and what was trained."""
    masks: list[tuple[bool, Tensor]] = []

    def recorded(x: Tensor, dropout: nn.Module, stream: int | None) -> Tensor:
        dropped = drop(x, dropout, stream)
        if dropout.training:
            masks.append(
                (stream is not None, (dropped == 0) & (x != 0))
            )  # attention leaves zeros where there is padding
            assert 0.4 < float(masks[-1][1].sum() / (x != 0).sum()) < 0.6
        return dropped

    with patch.object(variant, "drop", recorded):
        root = train_watched(recipe, cache, lambda model: None)
    return masks, digests(root)


def test_masks_differ_where_ranks_hold_different_things_and_nowhere_else(bench: Bench) -> None:
    """Two readers of two ranks each. A step draws the same when blocks run again in the backward, and when the run is resumed."""
    recipe = bench.recipe(
        bench.model("llama"),
        distributed=TP,
        training={"per_device_batch_size": 3},
        checkpoint={"export": "none", "every_steps": 1, "keep": 3},
    )
    del recipe["data"]["validation_path"]
    recipe["peft"] = {"r": 4, "dropout": 0.5, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}
    ranks = bench.ranks.call(4, train_recorded, recipe, bench.cache)
    losses = [record["loss"] for record in records(recipe, "loss")]
    for calls in zip(*(masks for masks, _ in ranks), strict=True):
        owns, (first, same_rows, *others) = [own for own, _ in calls], [mask for _, mask in calls]
        assert len(set(owns)) == 1
        assert torch.equal(first, same_rows) != owns[0]
        assert not any(first.shape == other.shape and torch.equal(first, other) for other in others)
    assert {own for own, _ in ranks[0][0]} == {False, True}
    kept = [
        [digest for name, digest in found.items() if "lora_B" in name and ("o_proj" in name or "down" in name)]
        for _, found in ranks
    ]
    assert kept[0] == kept[1], "what tp ranks hold whole stays the same on them"

    again = {**recipe, "checkpoint": {**recipe["checkpoint"], "dir": f"{recipe['checkpoint']['dir']}-again"}}
    again["training"] = {**recipe["training"], "activation_checkpointing": "full"}
    bench.ranks.call(4, train_recorded, again, bench.cache)
    assert [record["loss"] for record in records(again, "loss")] == losses

    shutil.rmtree(Path(recipe["checkpoint"]["dir"]) / "checkpoints" / "step-3")
    bench.ranks.call(4, train_recorded, recipe, bench.cache)
    assert [record["loss"] for record in records(recipe, "loss")] == losses
