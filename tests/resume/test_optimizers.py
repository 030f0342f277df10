"""Runs whose optimizer keeps more than two moments: stopped, gone on with on another layout, and exported.

tests/dist/test_optimizers.py has every optimizer on every way of cutting, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshtune.recipes.exporting import export_checkpoint
from tests.resume.conftest import Bench
from tests.resume.runs import checkpoint, losses, tensors

# Where averages are other than the weights of training (from step 3 on) a validation comes first, and no checkpoint with it, for
# saving would make FSDP2 forget what it has gathered.
FREE: dict[str, Any] = {
    "optimizer": {"name": "schedule_free_adamw"},
    "lr_scheduler": {"name": "constant", "warmup_steps": 2},
    "training": {"max_steps": 6, "eval_every_steps": 3},
    "checkpoint": {"every_steps": 5, "keep": None, "export": "all"},
}


def test_schedule_free_weights_go_on_where_they_were_and_their_average_is_exported(
    bench: Bench, tmp_path: Path
) -> None:
    """C36, C45: a stop and another layout change no loss; validations and exports on the way change none either; what is
    exported is the average, which a plain formula gives of the checkpoint's tensors."""
    model = bench.model("llama")
    found = bench.recipe(model, **FREE, data={"validation_path": str(bench.validation_path)})
    alone = bench.recipe(model, **{**FREE, "training": {"max_steps": 6}, "checkpoint": {"export": "none"}})
    assert bench.train({**found, "distributed": {"strategy": "fsdp2"}}, 2, 4).stopped_after == 4
    assert bench.train({**found, "distributed": {"tp_size": 2}}, 2).error is None
    assert bench.train(alone).error is None
    run = Path(found["checkpoint"]["dir"])
    assert losses(run) == pytest.approx(losses(Path(alone["checkpoint"]["dir"])), rel=1e-5)
    held = tensors(checkpoint(run, 6))
    export_checkpoint(run, tmp_path / "export")
    for folder in (tmp_path / "export", checkpoint(run, 6) / "export"):
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            y, z = held[f"optimizer.{name}.training_weight"], held[f"optimizer.{name}.z"]
            torch.testing.assert_close(exported[name], y + (1 - 1 / 0.9) * (z - y), rtol=1e-5, atol=1e-6)
            assert not torch.allclose(exported[name], y, atol=1e-4)


def test_a_changed_optimizer_is_refused_and_a_changed_group_is_said(bench: Bench) -> None:
    model = bench.model("llama")
    recipe = bench.recipe(model, training={"max_steps": 4})
    assert bench.train(recipe, 1, 2).stopped_after == 2
    refused = bench.train({**recipe, "optimizer": {"name": "adafactor"}})
    assert refused.error is not None and "optimizer.name was 'adamw', is 'adafactor'" in refused.error
    refused = bench.train({**recipe, "model": {**recipe["model"], "freeze": ["lm_head"]}})
    assert refused.error is not None and "model.freeze was None, is ['lm_head']" in refused.error
    groups = [{"match": ["layers.0"], "lr_scale": 0.5}]
    outcome = bench.train({**recipe, "optimizer": {**recipe["optimizer"], "groups": groups}})
    assert outcome.error is None
    assert "optimizer.groups was []" in outcome.said and "group       layers.0: " in outcome.said
