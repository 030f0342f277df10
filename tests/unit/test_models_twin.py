"""A large config is cut to a twin that keeps its architecture; a small one is its own twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from meshtune.errors import ModelError
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.section import ModelSection
from meshtune.models.shrink import Cut, divisors, shrink
from meshtune.models.source import Source, causal_lm
from meshtune.models.twin import build_twin, parameter_count, row_of_tokens, twin_config
from tests.unit.models_tiny import tiny_config, tiny_source

CPU = torch.device("cpu")
# Sizes as published for checkpoints whose relations between widths and head counts are easy to break.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "70B": (
        "llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128009]},
    ),
    "7 heads a group": (
        "qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064},
    ),
    "mamba and attention": (
        "bamba",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}
        | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_expand": 2, "vocab_size": 128256},
    ),
    "latent attention, 256 experts": ("deepseek_v3", {"pad_token_id": None}),
    "linear attention": ("qwen3_next", {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 512}),
    "windows, per-layer sizes": ("gemma4_text", {}),
    "shared keys and values": ("gemma3n_text", {"hidden_size": 512, "intermediate_size": 1024}),
}


def _source(model_type: str, values: dict[str, Any]) -> Source:
    model_class, config = causal_lm(AutoConfig.for_model(model_type, **values))
    return Source(ModelSection(name=model_type, weights="random"), model_type, config, model_class)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_has_a_twin_that_runs_and_keeps_its_kinds_of_layer(name: str) -> None:
    source = _source(*LARGE[name])
    before = source.config.to_dict()
    config = twin_config(source)
    assert parameter_count(source, config) <= 50_000_000 < parameter_count(source, source.config)
    after = config.to_dict()
    assert set(before.get("layer_types") or ()) == set(after.get("layer_types") or ())
    assert before.get("head_dim") == after.get("head_dim")
    assert source.config.to_dict() == before


def test_widths_and_heads_are_divided_alike() -> None:
    config = twin_config(_source(*LARGE["70B"]))
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (128, 1, 128)
    assert (config.intermediate_size, config.num_key_value_heads, config.vocab_size) == (448, 1, 128)
    assert (config.bos_token_id, config.eos_token_id, config.num_hidden_layers) == (0, [0, 0], 2)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, [32, 16, 8, 4, 2, 1]),
        ({"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11009}, [32, 16, 8, 4, 2, 1]),
        ({"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}, [28, 14, 7, 2, 1]),
        ({"hidden_size": 64, "num_attention_heads": 4}, [4, 2, 1]),
        ({"hidden_size": 32, "num_attention_heads": 32}, [2, 1]),
        ({"hidden_size": 1000, "text_config": {"hidden_size": 1500, "num_heads": 5}}, [5, 1]),
        ({"vocab_size": 10}, [1]),
    ],
)
def test_divisors_are_shared_by_every_width_and_head_count(values: dict[str, Any], wanted: list[int]) -> None:
    assert divisors(values) == wanted


def _cut(**values: Any) -> dict[str, Any]:
    return shrink(values, Cut())


def test_layers_are_cut_to_a_prefix_that_holds_every_kind() -> None:
    kinds = ["a"] * 5 + ["b"] + ["a"] * 6
    assert _cut(num_hidden_layers=12) == {"num_hidden_layers": 2}
    assert _cut(num_hidden_layers=12, layer_types=kinds) == {"num_hidden_layers": 6, "layer_types": kinds[:6]}
    assert _cut(num_hidden_layers=12, attn_layer_period=4) == {"num_hidden_layers": 5, "attn_layer_period": 4}
    assert _cut(num_hidden_layers=12, first_k_dense_replace=3)["num_hidden_layers"] == 4
    assert _cut(num_hidden_layers=12, full_attn_idxs=[4, 9, 11]) == {"num_hidden_layers": 6, "full_attn_idxs": [4]}
    overrides = {3: {"hidden_size": 8}, 7: {"hidden_size": 8}}
    assert _cut(num_hidden_layers=12, per_layer_config=overrides)["per_layer_config"] == {3: {"hidden_size": 8}}
    assert _cut(num_hidden_layers=12, layer_types=kinds, num_kv_shared_layers=5)["num_kv_shared_layers"] == 5
    assert _cut(num_hidden_layers=12, max_window_layers=30)["num_hidden_layers"] == 2
    assert _cut(num_hidden_layers=1, layer_types=["a"]) == {"num_hidden_layers": 1, "layer_types": ["a"]}


def test_experts_vocabulary_and_inner_widths_are_cut_and_ratios_kept() -> None:
    assert _cut(num_experts=64, num_experts_per_tok=8, n_group=8, topk_group=4) == {
        "num_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1
    }  # fmt: skip
    tokens = _cut(vocab_size=50000, pad_token_id=49999, image_token_id=7)
    assert tokens == {"vocab_size": 128, "pad_token_id": 0, "image_token_id": 7}
    cut = shrink(
        {"hidden_size": 320, "intermediate_size": 1000, "num_heads": 5, "num_kv_heads": 1, "head_dim": 64}, Cut(5)
    )
    assert cut == {"hidden_size": 64, "intermediate_size": 200, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
    assert shrink({"intermediate_size": 1001}, Cut(5)) == {"intermediate_size": 208}
    assert shrink({"rope_parameters": {"factor": 8}, "tie": True, "x": None}, Cut(5)) == {
        "rope_parameters": {"factor": 8}, "tie": True, "x": None
    }  # fmt: skip


def test_a_small_config_is_its_own_twin_with_its_windows_inside_a_row() -> None:
    source = tiny_source("gemma2", attention_dropout=0.5, attn_logit_softcapping=50.0)
    wanted = {**source.config.to_dict(), "sliding_window": 4, "attention_dropout": 0.0}
    wanted |= {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}
    assert twin_config(source).to_dict() == wanted


def test_a_twins_weights_follow_from_its_config_and_none_hides_what_it_does() -> None:
    """Sinks and biases begin at zero, norms at one: on them a proof would see nothing."""
    source = tiny_source("gpt_oss")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (build_twin(source, source.config, name, CPU) for name in ("eager", DOCUMENT_ATTENTION))
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.std() > 0.01, name


def test_the_row_holds_ordinary_tokens_only() -> None:
    special = list(range(4, 60))
    model = build_twin(tiny_source("llama"), tiny_config("llama", eos_token_id=special, pad_token_id=3), "eager", CPU)
    row = row_of_tokens(model, 200)
    assert set(row.tolist()).isdisjoint({1, 3, *special}) and row.max() < 97


def test_a_config_that_transformers_cannot_build_or_run_is_refused_with_the_reason() -> None:
    unbuildable = tiny_source("llama")
    unbuildable.config.hidden_act = "nosuch"
    with pytest.raises(ModelError, match=r"transformers cannot build LlamaForCausalLM from this config \(KeyError"):
        twin_config(unbuildable)
    unrunnable = tiny_source("qwen3_moe")
    unrunnable.config.num_experts_per_tok = 9
    with pytest.raises(
        ModelError, match=r"no small twin of Qwen3MoeForCausalLM could be built to try it on \(RuntimeError"
    ):
        twin_config(unrunnable)
