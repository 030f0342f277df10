"""What `meshtune verify` makes of a recipe's quantised weights."""

from __future__ import annotations

from pathlib import Path

from meshtune.config import from_mapping
from meshtune.layout import DistributedSection
from meshtune.models import hf
from meshtune.models.quantization.choosing import choose
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from meshtune.recipes.recipe import Recipe
from meshtune.verify import quantised
from meshtune.verify.layouts import choose as layouts
from tests.unit.models_tiny import save_tiny


def test_a_small_model_has_the_same_layers_as_int8_and_the_whole_model_says_what_it_cannot(tmp_path: Path) -> None:
    whole = save_tiny("llama", tmp_path / "whole", hidden_size=64, intermediate_size=192, head_dim=16)
    small = save_tiny("llama", tmp_path / "small")
    values = {"model": {"name": str(whole)}, "peft": {}, "data": {"train_path": "rows.jsonl"}}
    section = {"type": "fp4", "double_quant": False, "exclude_modules": ["v_proj"]}
    recipe = from_mapping(Recipe, {**values, "training": {"learning_rate": 1e-3}, "quantization": section})
    source = resolve(recipe.model, recipe.quantization)
    found = quantised.made_small(recipe, source, str(small))
    assert found is not None and (found.type, found.library, found.block) == ("int8", "bitsandbytes", None)
    model = hf.build(resolve(ModelSection(name=str(small))), "eager")
    kinds = {path.rpartition(".")[2] for path in choose(model, found).layers}
    assert kinds == {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, "heads and values are excluded"
    trials = layouts("fsdp2,tp2", DistributedSection(), False)
    refused = quantised.refusals(recipe, source, trials)
    assert list(refused) == ["tp2"] and "o_proj [64, 64]" in refused["tp2"] and "down_proj [64, 192]" in refused["tp2"]
    assert quantised.made_small(recipe.model_copy(update={"quantization": None}), source, str(small)) is None
