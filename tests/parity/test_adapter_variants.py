"""Promise 1 for every kind of adapter (B9): loss, gradient norm and all that is trained, as PEFT has them in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.adapters import ALPHA, RANK, differences, references, train_adapters
from tests.parity.conftest import Bench
from tests.parity.meshes import CP, PP, SP, TP
from tests.parity.reference import Course
from tests.parity.runs import TOLERANCE

ALL = {"target_modules": "all-linear"}
QUERIES = {"target_modules": ["q_proj"]}
TOKENS = {**QUERIES, "trainable_token_indices": [70, 200, 97]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EP = {"ep_size": 2}
# Architecture, the adapter in PEFT's words, what the recipe says otherwise, and the layouts of two ranks and of four.
Case = tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]
CASES: dict[str, Case] = {
    "dora": ("llama", {**ALL, "use_dora": True}, {}, [{}, TP, SP, CP, PP], [{**PP, **SP}]),
    "dora-fused": ("phi3", {**ALL, "use_dora": True}, {}, [TP], []),
    "dora-conv1d": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True, "fan_in_fan_out": True},
        {},
        [{}, TP],
        [],
    ),
    "dora-embedding-head": (
        "qwen3",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
        {},
        [{}, TP, PP],
        [],
    ),
    "rslora-patterns": (
        "llama",
        {**ALL, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {},
        [{"strategy": "ddp"}, TP],
        [],
    ),
    "pissa": ("llama", {**ALL, "init_lora_weights": "pissa"}, {}, [{}, SP, PP], []),
    "olora-dora": ("llama", {**ALL, "init_lora_weights": "olora", "use_dora": True}, {}, [TP], []),
    "saved-head-embedding": (
        "llama",
        {**QUERIES, "modules_to_save": ["lm_head", "embed_tokens", "model.norm"]},
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        [{}, TP, SP, PP],
        [],
    ),
    "saved-tied-head": ("qwen3", {**QUERIES, "modules_to_save": ["lm_head"]}, {}, [TP, PP], []),
    "saved-inside": ("llama", {**QUERIES, "modules_to_save": ["mlp"]}, {}, [SP], []),
    "tokens": ("llama", TOKENS, {}, [CP, TP], []),
    "tokens-tied": ("qwen3", TOKENS, {}, [{}, SP, PP], [{**PP, **TP}]),
    "experts": (
        "qwen3_moe",
        {**QUERIES, "target_parameters": EXPERTS},
        {"target_parameters": ["all-experts"]},
        [{}, TP, EP],
        [{**TP, **EP}],
    ),
    "router": ("qwen3_moe", {**QUERIES, "target_parameters": ["mlp.gate.weight"]}, {}, [SP], []),
}
# A router's gradient is a small difference of large numbers.
LOOSE = {"router": 1e-4}


@pytest.fixture(scope="module")
def wanted(bench: Bench) -> dict[str, Course]:
    cases = [(bench.model(architecture), config) for architecture, config, *_ in CASES.values()]
    courses = bench.ranks.call(1, references, cases, bench.windows(False)[:3], timeout=300.0)[0]
    return dict(zip(CASES, courses, strict=True))


def recipe_of(bench: Bench, case: str, distributed: dict[str, Any]) -> dict[str, Any]:
    architecture, config, changes, *_ = CASES[case]
    keys = {key: value for key, value in config.items() if key != "fan_in_fan_out"}
    recipe = bench.recipe(
        bench.model(architecture),
        distributed=distributed,
        training={"per_device_batch_size": 2},
        checkpoint={"export": "none"},
    )
    del recipe["data"]["validation_path"]
    return {**recipe, "peft": {"r": RANK, "alpha": ALPHA, **keys, **changes}}


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_kind_of_adapter_trains_as_peft_s_on_every_layout(
    bench: Bench, wanted: dict[str, Course], world_size: int
) -> None:
    """Rows of unequal token counts, three micro-batches of them on most ranks, three steps of AdamW."""
    runs = [(case, layout) for case, found in CASES.items() for layout in found[3 if world_size == 2 else 4]]
    recipes = [recipe_of(bench, case, layout) for case, layout in runs]
    courses = bench.ranks.call(world_size, train_adapters, recipes, bench.cache, timeout=500.0)[0]
    for (case, layout), found in zip(runs, courses, strict=True):
        assert isinstance(found, Course)
        off = differences(found, wanted[case])
        assert max(off["loss"], off["grad_norm"]) <= TOLERANCE, (case, layout, off)
        assert off["weights"] <= LOOSE.get(case, TOLERANCE), (case, layout, off)
