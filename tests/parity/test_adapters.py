"""Promise 1 for adapters: on every layout the loss, the gradient norm and each A and B of PEFT's own model in one process.

Three steps of AdamW with weight decay and clipping, three micro-batches of unequal token counts, float32, B not zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.adapters import ALPHA, RANK, differences, references, train_adapters
from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.meshes import CP, PP, SP, TP, split
from tests.parity.reference import Course
from tests.parity.runs import TOLERANCE

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}
ALL = {"target_modules": "all-linear"}
PATTERNS = {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {r"layers\.0\..*down_proj": 3.0}}

# Architecture, settings of its config, the adapter in the recipe's words and in PEFT's.
Adapter = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
ADAPTERS: dict[str, Adapter] = {
    "linear": ("llama", {}, PATTERNS, {**ALL, **PATTERNS}),
    "fused": ("phi3", {}, {}, ALL),
    "conv1d": ("gpt2", {}, {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "one head": ("llama", {"num_key_value_heads": 1}, {}, ALL),
    "ends": ("llama", {}, ENDS, ENDS),
    "tied ends": ("qwen3", {}, ENDS, ENDS),
    "experts": (
        "qwen3_moe",
        {},
        {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
        {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    ),
    "last layer": (
        "llama",
        {},
        {"target_modules": r".*layers\.1\..*q_proj"},
        {"target_modules": r".*layers\.1\..*q_proj"},
    ),
}
FSDP: dict[str, Any] = {"dp_shard": 2}
TWO_RANKS: list[tuple[str, dict[str, Any], bool]] = [
    ("linear", FSDP, False),
    ("linear", {**FSDP, "strategy": "ddp"}, True),
    ("linear", CP, True),
    ("linear", PP, False),
    ("linear", SP, True),
    ("fused", TP, False),
    ("conv1d", SP, True),
    ("one head", TP, True),
    ("ends", SP, False),
    ("tied ends", PP, True),
    ("tied ends", TP, False),
    ("experts", {**FSDP, "ep_size": 2}, True),
    ("experts", {**TP, "ep_size": 2}, False),
    ("experts", SP, False),
    ("last layer", PP, False),
]
FOUR_RANKS: list[tuple[str, dict[str, Any], bool]] = [
    ("experts", {**SP, **FSDP, "ep_size": 2}, True),
    ("tied ends", {**PP, **TP}, False),
    ("fused", {**FSDP, "dp_replicate_size": 2}, True),
]


def wanted(bench: Bench, cases: list[tuple[str, dict[str, Any], bool]]) -> dict[tuple[str, bool], Course]:
    """PEFT's course of each case, found in one go."""
    found: dict[tuple[str, bool], Course] = {}
    for packed in (False, True):
        names = list(dict.fromkeys(name for name, _, how in cases if how == packed))
        asked = [(model_of(bench, name), ADAPTERS[name][3]) for name in names]
        (courses,) = bench.ranks.call(1, references, asked, bench.windows(packed)[:3])
        found.update({(name, packed): course for name, course in zip(names, courses, strict=True)})
    return found


def model_of(bench: Bench, name: str) -> Any:
    architecture, settings, _, _ = ADAPTERS[name]
    return bench.model(architecture, name if settings else "", **settings)


def recipe_of(bench: Bench, name: str, layout: dict[str, Any], packed: bool) -> dict[str, Any]:
    section, _, readers = split(layout)
    training = {"per_device_batch_size": GLOBAL_BATCH // readers // 3}
    recipe = bench.recipe(model_of(bench, name), packed, distributed=section, training=training)
    del recipe["data"]["validation_path"]
    return {**recipe, "peft": {"r": RANK, "alpha": float(ALPHA), **ADAPTERS[name][2]}}


@pytest.mark.parametrize("cases", [TWO_RANKS, FOUR_RANKS], ids=["two ranks", "four ranks"])
def test_adapters_train_as_in_peft(bench: Bench, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    """Column-wise, row-wise, fused and Conv1D layers, one key-value head for two ranks, embedding and head, tied and not, experts
    and their router, a stage without any adapter."""
    (ranks,) = {split(layout)[1] for _, layout, _ in cases}
    courses = wanted(bench, cases)
    recipes = [recipe_of(bench, *case) for case in cases]
    found, *_ = bench.ranks.call(ranks, train_adapters, recipes, bench.cache, timeout=500)
    apart = {
        f"{name} {layout}": differences(course, courses[name, packed])
        for course, (name, layout, packed) in zip(found, cases, strict=True)
    }
    limits = {"loss": TOLERANCE, "grad_norm": TOLERANCE, "weights": 2 * TOLERANCE}
    assert {case: far for case, far in apart.items() if any(far[key] > limits[key] for key in limits)} == {}


def test_frozen_weights_in_bfloat16_are_computed_with_as_they_are_held(bench: Bench) -> None:
    """Beside an adapter in float32: within the rounding of bfloat16, on stages, with experts shared out, and widened for DDP."""
    cases = [
        ("ends", PP, "bf16"),
        ("experts", {**FSDP, "ep_size": 2}, "bf16"),
        ("ends", {**FSDP, "strategy": "ddp"}, "fp32"),
    ]
    recipes = []
    for name, layout, precision in cases:
        recipe = recipe_of(bench, name, layout, False)
        recipe["model"]["name"] = str(bench.model(ADAPTERS[name][0], "bf16", dtype=torch.bfloat16))
        recipe["training"]["precision"] = precision
        recipes.append(recipe)
    found, *_ = bench.ranks.call(2, train_adapters, recipes, bench.cache)
    courses = wanted(bench, [(name, layout, False) for name, layout, _ in cases])
    for course, (name, _, _) in zip(found, cases, strict=True):
        assert course.loss == pytest.approx(courses[name, False].loss, rel=2e-3)
        assert course.grad_norm == pytest.approx(courses[name, False].grad_norm, rel=1e-2)
        assert {tensor.dtype for tensor in course.weights.values()} == {torch.float32}


def test_an_adapter_that_peft_has_saved_goes_on_as_there(bench: Bench) -> None:
    """Its files say its shape; each rank takes its part of them: of embedding, head and experts."""
    cases: list[tuple[str, dict[str, Any]]] = [("tied ends", SP), ("experts", {**FSDP, "ep_size": 2})]
    folders = [bench.folder / f"adapter-{name}" for name, _ in cases]
    asked = [(model_of(bench, name), ADAPTERS[name][3]) for name, _ in cases]
    (courses,) = bench.ranks.call(1, references, asked, bench.windows(False)[:3], folders)
    recipes = [
        {**recipe_of(bench, name, layout, False), "peft": {"adapter": str(folder)}}
        for (name, layout), folder in zip(cases, folders, strict=True)
    ]
    found, *_ = bench.ranks.call(2, train_adapters, recipes, bench.cache)
    for course, reference in zip(found, courses, strict=True):
        apart = differences(course, reference)
        assert max(apart["loss"], apart["grad_norm"]) < TOLERANCE
        assert apart["weights"] < 2 * TOLERANCE
