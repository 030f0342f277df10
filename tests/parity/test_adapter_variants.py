"""Promise 1 for variants of LoRA (B9): loss, gradient norm and all that is trained, as PEFT has them in one process."""

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
ENDS = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
# Architecture, the adapter in PEFT's words, what the recipe says otherwise, and the layouts of two ranks and of four.
Case = tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]
CASES: dict[str, Case] = {
    "dora": ("llama", {**ALL, "use_dora": True}, {}, [{}, SP, CP], [{**PP, **SP}]),
    "dora-fused": ("phi3", {**ALL, "use_dora": True}, {}, [TP], []),
    "dora-conv1d": ("gpt2", {**CONV1D, "use_dora": True}, {}, [TP], []),
    "dora-ends": ("qwen3", {**ENDS, "use_dora": True}, {}, [TP, PP], []),
    "pissa": ("llama", {**ALL, "init_lora_weights": "pissa"}, {}, [SP, PP], []),
    "olora-dora": ("llama", {**ALL, "init_lora_weights": "olora", "use_dora": True}, {}, [TP], []),
    "saved-ends": (
        "llama",
        {**QUERIES, "modules_to_save": ["lm_head", "embed_tokens", "model.norm"]},
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        [{}, SP],
        [],
    ),
    "saved-tied-head": ("qwen3", {**QUERIES, "modules_to_save": ["lm_head"]}, {}, [PP], []),
    "saved-inside": ("llama", {**QUERIES, "modules_to_save": ["mlp"]}, {}, [SP], []),
    "tokens": ("llama", TOKENS, {}, [TP], []),
    "tokens-tied": ("qwen3", TOKENS, {}, [{}, SP], [{**PP, **TP}]),
}


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
def test_every_variant_trains_as_peft_s_on_every_layout(
    bench: Bench, wanted: dict[str, Course], world_size: int
) -> None:
    """Rows of unequal token counts, three micro-batches of them on most ranks, three steps of AdamW. Plain LoRA has a file of its
    own."""
    runs = [(case, layout) for case, found in CASES.items() for layout in found[3 if world_size == 2 else 4]]
    recipes = [recipe_of(bench, case, layout) for case, layout in runs]
    courses = bench.ranks.call(world_size, train_adapters, recipes, bench.cache, timeout=500.0)[0]
    for (case, layout), found in zip(runs, courses, strict=True):
        assert isinstance(found, Course)
        off = differences(found, wanted[case])
        assert max(off["loss"], off["grad_norm"]) <= TOLERANCE, (case, layout, off)
        assert off["weights"] <= TOLERANCE, (case, layout, off)
