"""What `meshtune verify` makes of a recipe's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.models import hf
from meshtune.models.adapters import files
from meshtune.models.adapters.inject import inject
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from meshtune.recipes import adapting
from meshtune.recipes.recipe import Recipe
from meshtune.verify import adapters
from tests.unit.models_tiny import save_tiny

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def recipe(model: Path, **peft: Any) -> Recipe:
    needed = {"data": {"train_path": "rows.jsonl"}, "training": {"learning_rate": 1e-3}}
    return from_mapping(Recipe, {"model": {"name": str(model)}, **needed, "peft": peft})


@pytest.mark.parametrize(
    "peft",
    [
        {"target_modules": [], "target_parameters": EXPERTS},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "use_rslora": True},
        {"target_modules": ["v_proj"], "trainable_token_indices": [5, 9]},
    ],
    ids=["experts", "saved", "tokens"],
)
@pytest.mark.parametrize("stored", [False, True], ids=["named", "in files"])
def test_a_small_model_has_an_adapter_of_the_same_kinds(tmp_path: Path, peft: dict[str, Any], stored: bool) -> None:
    """Whether the recipe says what it is for, or the files of the adapter that it goes on from."""
    whole = save_tiny("qwen3_moe", tmp_path / "whole", num_hidden_layers=3)
    small = save_tiny("qwen3_moe", tmp_path / "small", num_hidden_layers=1)
    asked = recipe(whole, r=8, alpha=4, **peft)
    source = resolve(asked.model)
    if stored:
        chosen = adapting.choose(asked, source)
        assert chosen is not None
        asked = recipe(whole, adapter=str(written(chosen, source, tmp_path / "adapter")))
    found = adapters.made_small(asked, source, str(small))
    assert found is not None and (found.r, found.alpha, found.adapter) == (4, 2.0, None)
    assert kinds(recipe(small, **found.model_dump(exclude_none=True))) == kinds(asked)


def written(chosen: adapting.Chosen, source: Any, folder: Path) -> Path:
    """The folder of such an adapter, all of zeros."""
    import torch
    from safetensors.torch import save_file

    model = hf.build(source, "eager")
    adapter = inject(model, recipe(Path("x"), r=8).peft, chosen.config)  # type: ignore[arg-type]
    tensors = {name: p for name, p in model.named_parameters() if name in adapter.tensors}
    files.write_config(folder, chosen.config, source.name)
    save_file({files.file_name(name): torch.zeros(p.shape) for name, p in tensors.items()}, folder / files.WEIGHTS)
    return folder


def kinds(of: Recipe) -> set[str]:
    """What is trained, by names without the numbers of layers."""
    source = resolve(ModelSection(name=of.model.name))
    chosen = adapting.choose(of, source)
    assert chosen is not None and of.peft is not None
    return {adapters.generic(name) for name in inject(hf.build(source, "eager"), of.peft, chosen.config).tensors}
