"""Plans of whole models, found and proved on twins: what blocks are given beside hidden states, and leave for later ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from meshtune.errors import LayoutError
from meshtune.layout import Layout
from meshtune.models.experts import experts_modules
from meshtune.models.hf import build
from meshtune.models.plans.regions import Experts
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, causal_lm
from meshtune.models.twin import build_twin
from meshtune.recipes.expert_proof import disagreement_over_experts
from meshtune.recipes.plans import declare, find_plan

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
_KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    # Per-layer inputs; four streams beside each other, in front of the batch; the last two layers take keys of others.
    "gemma3n": (
        "gemma3n_text",
        {**_PER_LAYER, "num_hidden_layers": 6, "layer_types": _KINDS * 3, "num_kv_shared_layers": 2}
        | {
            "activation_sparsity_pattern": [0.0] * 6,
            "intermediate_size": [48] * 6,
            "laurel_rank": 8,
            "sliding_window": 4,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {**_PER_LAYER, "layer_types": _KINDS, "num_kv_shared_layers": 0, "global_head_dim": 16, "sliding_window": 4},
    ),
    # Attention and feed-forward add the residual that they are given; a score bias for each head.
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    # Its blocks return pairs.
    "bamba": (
        "bamba",
        {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
        | {"mamba_n_groups": 1, "attn_layer_indices": [1], "mamba_expand": 2},
    ),
}


def source(name: str) -> Source:
    model_type, values = MODELS[name]
    model_class, config = causal_lm(AutoConfig.for_model(model_type, **{**_SIZES, **values}))
    return Source(ModelSection(name=name, weights="random"), name, config, model_class)


def layout(sequence_parallel: bool = False, ep: int = 1, **sizes: int) -> Layout:
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **sizes}
    return Layout(degrees, ep=ep, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("name", ["llama", "gemma3n", "gemma4", "bloom"])
def test_sequences_are_cut_whatever_blocks_are_given(name: str) -> None:
    """The whole model is run beside its cut form before the plan is returned."""
    found = find_plan(source(name), layout(sequence_parallel=True, tp=2))
    assert found is not None
    assert found.sequences.dim == (2 if name == "gemma3n" else 1)
    assert bool(found.sequences.beside) == (name in ("gemma3n", "gemma4"))
    adds = {choice.border for regions in found.regions.values() for _, choice in regions}
    assert (adds == {"adding"}) == (name == "bloom")


def test_layers_that_share_keys_are_on_one_stage() -> None:
    """Layers 4 and 5 take the keys of 2 and 3."""
    found = find_plan(source("gemma3n"), layout(pp=2))
    assert found is not None
    assert found.joined_units == {"model.layers.3", "model.layers.4", "model.layers.5"}
    assert "model.layers.3 to model.layers.5" in found.notes()[0]


@pytest.mark.parametrize("name", ["llama", "gemma4", "bloom", "bamba"])
def test_other_models_are_cut_between_any_two_layers(name: str) -> None:
    assert find_plan(source(name), layout(pp=2)) is None


def test_what_was_found_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_plan(source("llama"), layout(tp=2))
    monkeypatch.setattr("meshtune.recipes.plans.findings", lambda *_: pytest.fail("tried again"))
    assert find_plan(source("llama"), layout(tp=2)) == first


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    """A twin may have other counts, so the model itself is asked."""
    llama = source("llama")
    found = find_plan(llama, layout(tp=3))
    with pytest.raises(LayoutError, match="4 attention heads cannot be shared out among 3 tp ranks"):
        declare(build(llama, "eager"), found, layout(tp=3))


def test_experts_that_are_told_their_rows_by_order_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four experts for each token; with 12 tokens, not every expert has a row."""
    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 48,
    }
    model_class, config = causal_lm(AutoConfig.for_model("llama4_text", **_SIZES, **sizes, pad_token_id=None))
    llama4 = Source(ModelSection(name="llama4", weights="random"), "llama4", config, model_class)
    assert find_plan(llama4, layout(dp_shard=2, ep=2)) is None
    found = find_plan(llama4, layout(tp=2))
    assert found is not None and not found.whole  # within a tp group they are cut, stored transposed as they are
    assert any(isinstance(part, Experts) for regions in found.regions.values() for r, _ in regions for part in r.parts)
    twin = build_twin(llama4, config, "eager", torch.device("cpu"))
    experts = experts_modules(twin)
    assert [found.by_rows for found in experts] == [True, True]
    monkeypatch.setattr("meshtune.parallel.sorted_experts._places", lambda experts, count: (experts * 0, count))
    assert disagreement_over_experts(twin, experts) is not None


def test_experts_outside_of_every_split_are_not_shared_out_as_well() -> None:
    """Each tp rank serves its share of the tokens, so that somebody has to add the shares up."""
    model_class, config = causal_lm(
        AutoConfig.for_model("qwen3_moe", **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )
    qwen = Source(ModelSection(name="qwen", weights="random"), "qwen", config, model_class)
    both = layout(tp=2, ep=2)
    assert declare(build(qwen, "eager"), find_plan(qwen, both), both).experts
    found = find_plan(qwen, both, {"model.layers.*.mlp.experts": "replicate"})
    with pytest.raises(LayoutError, match=r"ep_size: 2 with tp_size: 2 .* model\.layers\.0\.mlp\.experts is in none"):
        declare(build(qwen, "eager"), found, both)
