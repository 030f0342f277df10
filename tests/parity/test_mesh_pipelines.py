"""Promise 1 where layers are cut into stages (C39, C50, C55, C56), in products with every other axis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.conftest import Bench
from tests.parity.meshes import CP, PP, SP, TP, check_mesh

INTERLEAVED = {**PP, "pp_schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {**PP, "pp_schedule": "interleaved_zero_bubble"}
GPIPE = {**PP, "pp_schedule": "gpipe"}

# Architecture, layout, number of layers, packed, micro-batches of a step, optimizer.
CASES: dict[str, tuple[str, dict[str, Any], int, bool, int, str]] = {
    "llama-pp2": ("llama", PP, 3, True, 2, "sgd"),
    "qwen3-pp2": ("qwen3", PP, 2, False, 3, "adamw"),
    "gpt2-pp2": ("gpt2", PP, 3, True, 3, "adamw"),
    "gemma2-pp2-gpipe": ("gemma2", GPIPE, 2, False, 1, "sgd"),
    "phi3-pp2-two-at-a-time": ("phi3", {**PP, "pp_microbatches": 2}, 2, True, 4, "adamw"),
    "mixtral-pp2-gpipe": ("mixtral", GPIPE, 2, False, 2, "sgd"),
    "qwen3_moe-pp2": ("qwen3_moe", PP, 3, True, 3, "adamw"),
    "qwen3-pp3": ("qwen3", {"pp_size": 3}, 5, True, 4, "sgd"),
    "llama-interleaved": ("llama", INTERLEAVED, 4, False, 4, "adamw"),
    "qwen3-interleaved": ("qwen3", INTERLEAVED, 5, True, 2, "sgd"),
    "qwen3-zero-bubble": ("qwen3", ZERO_BUBBLE, 4, True, 4, "adamw"),
    "mixtral-zero-bubble": ("mixtral", ZERO_BUBBLE, 4, False, 2, "sgd"),
    "qwen3-pp2xtp2+sp": ("qwen3", {**PP, **SP}, 3, True, 2, "sgd"),
    "gpt2-pp2xtp2": ("gpt2", {**PP, **TP}, 2, False, 3, "adamw"),
    "qwen3_moe-pp2xtp2-zero-bubble": ("qwen3_moe", {**ZERO_BUBBLE, **TP}, 4, True, 2, "adamw"),
    "llama-pp2xfsdp2-interleaved": ("llama", {**INTERLEAVED, "dp_shard": 2}, 4, True, 2, "adamw"),
    "mixtral-pp2xhsdp2": ("mixtral", {**PP, "dp_replicate_size": 2}, 2, False, 3, "sgd"),
    "qwen3-pp2xddp2": ("qwen3", {**PP, "strategy": "ddp", "dp_shard": 2}, 3, True, 3, "adamw"),
    "gemma2-pp2xcp2": ("gemma2", {**PP, **CP}, 2, True, 2, "sgd"),
    "qwen3_moe-pp2xep2": ("qwen3_moe", {**PP, "ep_size": 2, "dp_shard": 2}, 3, False, 2, "adamw"),
}
EIGHT: dict[str, tuple[str, dict[str, Any], int, bool, int, str]] = {
    "qwen3-pp2xfsdp2xtp2+sp": ("qwen3", {**PP, **SP, "dp_shard": 2}, 3, True, 3, "sgd"),
    "qwen3_moe-pp2xhsdp2xtp2xep2": (
        "qwen3_moe",
        {**PP, **TP, "dp_replicate_size": 2, "ep_size": 2},
        3,
        False,
        2,
        "adamw",
    ),
}


def check(bench: Bench, case: tuple[str, dict[str, Any], int, bool, int, str], **training: Any) -> None:
    architecture, layout, layers, packed, accumulation, optimizer = case
    variant = "" if layers == 2 else f"{layers}-layers"
    if variant:
        bench.model(architecture, variant, **{"n_layer" if architecture == "gpt2" else "num_hidden_layers": layers})
    check_mesh(bench, architecture, layout, packed, accumulation, optimizer, variant, **training)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_a_plain_loop(bench: Bench, name: str) -> None:
    check(bench, CASES[name])


@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_train_as_a_plain_loop(bench: Bench, name: str) -> None:
    check(bench, EIGHT[name])


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3-pp2xtp2+sp", "full"), ("qwen3_moe-pp2xep2", "selective"), ("qwen3-zero-bubble", "full")]
)
def test_activation_checkpointing_runs_blocks_of_a_stage_again(bench: Bench, name: str, mode: str) -> None:
    check(bench, CASES[name], activation_checkpointing=mode)


@pytest.mark.parametrize("layout", [PP, {**PP, "ep_size": 2, "dp_shard": 2}], ids=["pp2", "pp2xep2"])
def test_a_stage_without_experts_keeps_step(bench: Bench, layout: dict[str, Any]) -> None:
    """C56: the first layer is dense, so that the first stage has no expert to clip, to gather or to dispatch to."""
    bench.model("qwen3_moe", "dense-first", mlp_only_layers=[0])
    check_mesh(bench, "qwen3_moe", layout, False, 2, "sgd", "dense-first")
