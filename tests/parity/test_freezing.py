"""Freezing by pattern (C81): what is left is trained as in a plain loop, on every layout, and nothing else moves by a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.conftest import Bench
from tests.parity.meshes import PP, TP, WEIGHTS, split
from tests.parity.runs import check_course, exported_weights

FSDP, DDP = {"dp_shard": 2}, {"strategy": "ddp", "dp_shard": 2}
LOW = ("embed_tokens", "layers.0")
HIGH = ("layers.1", "norm", "lm_head")
# Architecture, layout, what is written in the recipe, and what of it does not learn.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "fsdp2, a tied head by its other name": ("qwen3", FSDP, {"freeze": ["lm_head"]}, ("embed_tokens",)),
    "tp2, projections of one layer": (
        "llama",
        TP,
        {"trainable": ["layers.1.*_proj"]},
        ("embed_tokens", "layers.0", "norm", "lm_head", "input_layernorm", "post_attention_layernorm"),
    ),
    "pp2, nothing on the first stage": ("llama", PP, {"freeze": [*LOW]}, LOW),
    "pp2, nothing on the last stage": ("llama", PP, {"trainable": [*LOW]}, HIGH),
    "ddp2, a regular expression": (
        "llama",
        DDP,
        {"trainable": r".*\.mlp\..*|lm_head\.weight"},
        ("embed_tokens", "self_attn", "norm", "input_layernorm", "post_attention_layernorm"),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_left_learns_as_in_a_plain_loop_and_nothing_else_moves(bench: Bench, case: str) -> None:
    architecture, layout, model, frozen = CASES[case]
    section, world_size, readers = split(layout)
    mode = "full" if "first" in case else "none"
    training = {"per_device_batch_size": 6 // readers, "activation_checkpointing": mode}
    folder = bench.model(architecture)
    recipe = bench.recipe(folder, distributed=section, training=training)
    recipe["model"].update(model)
    wanted = bench.plain(architecture, False, frozen=frozen)
    found, _ = bench.run(world_size, recipe)
    check_course(found, wanted, WEIGHTS)
    before = exported_weights(folder)
    moved = {name for name, weight in found.weights.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in wanted.weights.items() if not torch.equal(weight, before[name])}
    assert moved
    run = Path(recipe["checkpoint"]["dir"])
    learnt = moved - {"lm_head.weight"} if architecture == "qwen3" else moved
    for file in (next(run.glob("checkpoints/*/manifest.json")), run / "layout.json"):
        facts = json.loads(file.read_text(encoding="utf-8"))
        assert facts["trained_parameters"] == sum(before[name].numel() for name in learnt)
        assert facts["trained_tensors"] == len(learnt)
