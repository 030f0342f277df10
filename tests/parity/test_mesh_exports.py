"""Promise 5 where a model is cut: what goes in untrained comes out bit for bit, from any layout, with its names and dtypes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshtune.errors import MeshtuneError
from meshtune.recipes.exporting import export_checkpoint
from tests.parity.conftest import Bench
from tests.parity.meshes import CP, PP, SP, TP, split
from tests.parity.runs import train

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": TP,
    "cp2": CP,
    "pp2": PP,
    "fsdp2xtp2+sp": {**SP, "dp_shard": 2},
    "pp2xtp2": {**PP, **TP},
    "hsdp2xpp2": {**PP, "dp_replicate_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep_size": 2, "dp_shard": 2},
    "ep4xtp2": {**TP, "ep_size": 4, "dp_shard": 2},
    "pp2xep2": {**PP, "ep_size": 2, "dp_shard": 2},
}
# An untied head and biases, a tied head (C65), stacked projections, Conv1D, experts that the file has one by one.
DENSE = ["llama", "qwen3", "phi3", "gpt2"]
MIXTURES = ["mixtral", "qwen3_moe"]


def train_all(recipes: list[dict[str, Any]], cache: str) -> None:
    for recipe in recipes:
        train(recipe, cache)


def untrained(bench: Bench, model: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """A recipe of one step that changes no weight."""
    section, _, readers = split(layout)
    changes: dict[str, Any] = {
        "distributed": section,
        "training": {"learning_rate": 0.0, "max_steps": 1, "per_device_batch_size": 12 // readers // 2},
        "lr_scheduler": {"name": "constant"},
    }
    recipe = {**bench.recipe(Path(), True, **changes), "model": model}
    del recipe["data"]["validation_path"]
    return recipe


def exported(recipe: dict[str, Any]) -> dict[str, Tensor]:
    return load_file(run_export(recipe) / "model.safetensors")


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert found.keys() == wanted.keys(), where
    different = [n for n, t in wanted.items() if t.dtype != found[n].dtype or not torch.equal(found[n], t)]
    assert not different, (where, different)


@pytest.mark.parametrize("name", [*LAYOUTS, *EXPERTS])
def test_an_untrained_round_trip_is_bit_identical(bench: Bench, name: str) -> None:
    """C64, C65, C74: weights stored in bf16 and float32, tied heads left out as they were, experts one by one again."""
    layout = {**LAYOUTS, **EXPERTS}[name]
    architectures = [*DENSE, MIXTURES[len(name) % 2]] if name in LAYOUTS else MIXTURES
    folders = [
        bench.model(architecture, "bf16", dtype=torch.bfloat16) if index % 2 else bench.model(architecture)
        for index, architecture in enumerate(architectures)
    ]
    recipes = [untrained(bench, {"name": str(folder)}, layout) for folder in folders]
    bench.ranks.call(split(layout)[1], train_all, recipes, bench.cache)
    for folder, recipe in zip(folders, recipes, strict=True):
        assert_same_bits(exported(recipe), load_file(folder / "model.safetensors"), folder.name)


def test_random_weights_are_the_same_on_any_mesh(bench: Bench) -> None:
    """C52: they follow from the seed and from names, and each rank keeps its part."""
    wanted: dict[str, dict[str, Tensor]] = {}
    for name, layout in {"one": {}, **LAYOUTS, **EXPERTS}.items():
        architectures = ["qwen3_moe"] if name in EXPERTS else ["gpt2", "qwen3_moe"]
        recipes = {
            a: untrained(bench, {"name": str(bench.model(a)), "weights": "random"}, layout) for a in architectures
        }
        bench.ranks.call(split(layout)[1], train_all, list(recipes.values()), bench.cache)
        for architecture, recipe in recipes.items():
            found = exported(recipe)
            assert_same_bits(found, wanted.setdefault(architecture, found), f"{architecture} on {name}")
    assert all(tensor.float().std() > 0 for tensor in wanted["gpt2"].values() if tensor.ndim > 1)


def train_or_error(recipe: dict[str, Any], cache: str) -> str:
    try:
        train(recipe, cache)
    except MeshtuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", ["tp2", "pp2", "ep2"])
def test_a_tensor_that_is_missing_ends_every_rank(bench: Bench, name: str, tmp_path: Path) -> None:
    """C73: also those whose own part of the model does not have it. Nothing is left at random."""
    layout = {**LAYOUTS, **EXPERTS}[name]
    shutil.copytree(bench.model("mixtral"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    recipe = untrained(bench, {"name": str(tmp_path / "model")}, layout)
    errors = bench.ranks.call(split(layout)[1], train_or_error, recipe, bench.cache)
    assert all("model.layers.1.self_attn.o_proj.weight" in error for error in errors), errors


ADAPTERS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["norm"],
        "trainable_token_indices": [5, 9],
    },
    "phi3": {
        "target_modules": ["qkv_proj", "down_proj", "lm_head"],
        "use_dora": True,
        "rank_pattern": {"down_proj": 3},
    },
    "qwen3_moe": {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def save_adapter(base: Path, folder: Path, config: dict[str, Any]) -> Path:
    """As PEFT writes one that was trained: nothing in it is zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **config))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.rand(parameter.shape) + 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["fsdp2xtp2+sp", "pp2", "ep2"])
def test_an_adapter_of_pefts_goes_in_and_comes_out_bit_for_bit(bench: Bench, name: str, tmp_path: Path) -> None:
    """C77: experts' parts, magnitudes, rows of tokens and modules that are trained whole included."""
    layout = {**LAYOUTS, **EXPERTS}[name]
    recipes, theirs = [], []
    for architecture in ADAPTERS if name == "pp2" else ["qwen3_moe"] if name in EXPERTS else ["qwen3", "phi3"]:
        base = bench.model(architecture)
        theirs.append(save_adapter(base, tmp_path / architecture, ADAPTERS[architecture]))
        recipes.append({**untrained(bench, {"name": str(base)}, layout), "peft": {"adapter": str(theirs[-1])}})
    bench.ranks.call(split(layout)[1], train_all, recipes, bench.cache)
    bench.ranks.call(1, export_again, [run_export(recipe) for recipe in recipes])
    for folder, recipe in zip(theirs, recipes, strict=True):
        found, wanted = (load_file(one / "adapter_model.safetensors") for one in (run_export(recipe), folder))
        wanted = {f"{n}.weight" if n.endswith("magnitude_vector") else n: tensor for n, tensor in wanted.items()}
        wanted.pop("base_model.model.lm_head.base_layer.weight", None)  # which is the model's own
        assert_same_bits(found, wanted, folder.name)
        again = load_file(run_export(recipe).with_name("again") / "adapter_model.safetensors")
        assert_same_bits(again, wanted, f"{folder.name}, by one process")


def export_again(folders: list[Path]) -> None:
    """By one process, from the checkpoint that the ranks have left, beside each of the runs' own."""
    for folder in folders:
        export_checkpoint(folder.parent, folder.with_name("again"))


def run_export(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"]) / "export"
