"""Tiny models of many architectures, with the odd sizes that users' own small configs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from meshtune.models.section import ModelSection
from meshtune.models.source import Source, causal_lm, resolve

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_BERT_LIKE = {"is_decoder": True, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
_DROPOUTS = (
    "dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-odd": (
        "llama",
        {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 101}
        | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _SCALED_ROPE},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, **_WINDOWS}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_WINDOWS, "query_pre_attn_scalar": 12, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 12, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.0625, "tie_word_embeddings": True}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.5}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 1,
        }
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        | {"qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4},
    ),
    "gpt_oss": ("gpt_oss", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "hrm_text": ("hrm_text", {"num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 2}),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        }
        | {"vocab_size": 97, "max_position_embeddings": 64},
    ),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64}),
    "opt": (
        "opt",
        {"hidden_size": 48, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
        | {"word_embed_proj_dim": 32},
    ),
    "bert": ("bert", {**_BERT_LIKE, "intermediate_size": 40}),
    "electra": ("electra", {**_BERT_LIKE, "intermediate_size": 40, "embedding_size": 32}),
    "bloom": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "mamba": ("mamba", {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 8}),
}


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of `CONFIGS[name]`, with `changes`."""
    model_type, values = CONFIGS[name]
    shared = _LLAMA_LIKE if {"hidden_size", "n_embd"}.isdisjoint(values) or name == "llama-odd" else {}
    config = AutoConfig.for_model(model_type, **{**shared, **values, **changes})
    for dropout in _DROPOUTS:
        if hasattr(config, dropout) and dropout not in changes:
            setattr(config, dropout, 0.0)
    return config


def tiny_source(name: str, attention: str = "auto", **changes: Any) -> Source:
    """A source as `resolve` gives it, without a folder: random weights."""
    model_class, config = causal_lm(tiny_config(name, **changes))
    return Source(ModelSection(name=name, weights="random", attention=attention), name, config, model_class)


def tiny_model(name: str, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """A model of it in fp32 on the CPU, in eval mode; no parameter is left at zero or one."""
    source = tiny_source(name, **changes)
    source.config._attn_implementation = attention
    torch.manual_seed(0)
    return stirred(source.model_class(source.config)).eval()


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise added to every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def save_tiny(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """A checkpoint of it as transformers writes one."""
    model = tiny_model(name, **changes).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def saved_source(folder: Path, **section: Any) -> Source:
    """The source of a checkpoint's folder."""
    return resolve(ModelSection(name=str(folder), **section))
