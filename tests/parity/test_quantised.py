"""Adapters beside quantised weights (QLoRA): the numbers of PEFT on bitsandbytes' layers in one process, on every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from meshtune.layout.pieces import piece_of
from meshtune.models.adapters.view import base_view
from meshtune.models.causal_lm import CausalLM
from meshtune.models.placing import local_of, own_slice
from meshtune.models.quantization.loading import quantised_layers
from tests.parity import adapters
from tests.parity.adapters import differences, give_values, left_by, train_with_peft
from tests.parity.conftest import Bench
from tests.parity.conversations import Row
from tests.parity.meshes import CP, PP, SP, TP
from tests.parity.reference import Course
from tests.parity.runs import TOLERANCE, train_watched

# Parts of rows that two ranks cut have whole blocks of 64.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "attention_bias": False}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# What the recipe says, what transformers is told, and a word that both adapters have.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nf4": ({"type": "nf4"}, NF4, {}),
    "fp4": ({"type": "fp4", "double_quant": False}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, {}),
    "int8": ({"type": "int8"}, {"load_in_8bit": True}, {}),
    "nf4, DoRA": ({"type": "nf4"}, NF4, {"use_dora": True}),
}
ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {},
    "tp2+sp": SP,
    "cp2": CP,
    "pp2": PP,
}
ON_FOUR: dict[str, dict[str, Any]] = {"fsdp2xtp2": TP, "pp2xtp2": {**PP, **SP}}


def references(folder: Path, forms: Sequence[str], windows: Sequence[Sequence[Row]]) -> list[Course]:
    """On a rank: PEFT's LoRA on a model that transformers has quantised while it loaded it."""
    found = []
    for form in forms:
        settings = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **FORMS[form][1])
        load = partial(AutoModelForCausalLM.from_pretrained, quantization_config=settings, device_map="cpu")
        with patch.object(adapters, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=load)):
            found.append(train_with_peft(folder, {"target_modules": "all-linear", **FORMS[form][2]}, windows))
    return found


def train_all(recipes: Sequence[dict[str, Any]], cache: str, anew: bool = True) -> list[Course]:
    """On a rank: what each recipe's run left; those that begin `anew` begin with the reference's A and B."""
    courses = []
    for recipe in recipes:
        root = train_watched(recipe, cache, partial(look, recipe, anew))
        check_weights(root, recipe)
        courses.append(left_by(recipe, root))
    return courses


def look(recipe: dict[str, Any], anew: bool, root: CausalLM) -> None:
    if anew:
        give_values(root.model)
    check_weights(root, recipe)


def check_weights(root: CausalLM, recipe: dict[str, Any]) -> None:
    """Before training and after it, a rank holds its part of what the library makes of the whole weight, bit for bit."""
    with safe_open(Path(recipe["model"]["name"]) / "model.safetensors", "pt") as stored:
        layers = quantised_layers(base_view(root.model))
        assert len(layers) >= 7
        for path, layer in layers.items():
            for name, whole in layer.codec.quantise(stored.get_tensor(f"{path}.weight")).items():
                parameter = layer._parameters[name]
                assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
                assert not parameter.is_floating_point()
                assert torch.equal(local_of(parameter), own_slice(whole, parameter, piece_of(layer, name))), (
                    path,
                    name,
                )


def recipe_of(bench: Bench, form: str, distributed: dict[str, Any], ranks: int, **training: Any) -> dict[str, Any]:
    readers = ranks // (distributed.get("tp_size", 1) * distributed.get("cp_size", 1) * distributed.get("pp_size", 1))
    sizes = {"per_device_batch_size": 12 // readers // 2, **training}
    folder = bench.model("llama", "two blocks wide", **WIDE)
    recipe = bench.recipe(folder, distributed=distributed, training=sizes, checkpoint={"every_steps": 2})
    adapter = {"r": adapters.RANK, "alpha": adapters.ALPHA, **FORMS[form][2]}
    return {**recipe, "peft": adapter, "quantization": FORMS[form][0]}


def check(found: Course, wanted: Course, of: str) -> None:
    off = differences(found, wanted)
    assert max(off["loss"], off["grad_norm"]) < TOLERANCE and off["weights"] < 1e-4, (of, off)


def test_every_layout_has_the_numbers_of_peft_on_bitsandbytes(bench: Bench) -> None:
    """Loss, gradient norm and every A and B after three steps; with fsdp2 activations are made again in the backward. A run of it
    goes on elsewhere: its checkpoint holds no quantised weight, they come again from where they came from."""
    folder = bench.model("llama", "two blocks wide", **WIDE)
    courses = bench.ranks.call(1, references, folder, list(FORMS), bench.windows(False)[:3])[0]
    wanted = dict(zip(FORMS, courses, strict=True))
    assert len({course.loss[0] for course in courses}) == len(FORMS), "forms differ"
    runs = {
        2: [*(("nf4", name, layout) for name, layout in ON_TWO.items()), ("nf4, DoRA", "tp2", TP)],
        4: [(form, name, layout) for form, (name, layout) in zip(("fp4", "int8"), ON_FOUR.items(), strict=True)],
    }
    recipes: dict[str, dict[str, Any]] = {}
    for ranks, cases in runs.items():
        again = {"fsdp2": {"activation_checkpointing": "full"}}
        made = {name: recipe_of(bench, form, layout, ranks, **again.get(name, {})) for form, name, layout in cases}
        courses = bench.ranks.call(ranks, train_all, list(made.values()), bench.cache, timeout=300.0)[0]
        for (form, name, _), found in zip(cases, courses, strict=True):
            check(found, wanted[form], f"{form} on {name}")
        recipes |= made

    checkpoints = Path(recipes["fsdp2"]["checkpoint"]["dir"]) / "checkpoints"
    held = json.loads((checkpoints / "step-2" / "tensors.json").read_text(encoding="utf-8"))
    assert held and not any("base_layer" in name for name in held)
    shutil.rmtree(checkpoints / "step-3")
    elsewhere = {**recipe_of(bench, "nf4", SP, 2), "checkpoint": recipes["fsdp2"]["checkpoint"]}
    check(bench.ranks.call(2, train_all, [elsewhere], bench.cache, False)[0][0], wanted["nf4"], "resumed on tp2+sp")
