"""Tiny models with random weights of the real architectures, saved as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

# Weights far larger than a trained model's, so that scores reach the soft caps and experts differ.
_INITIALIZER_RANGE = 0.15

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": _INITIALIZER_RANGE,
}
_WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "tie_word_embeddings": False, "attention_bias": True},
    "qwen3": {**_COMMON, "tie_word_embeddings": True},
    "gemma2": {
        **_COMMON,
        **_WINDOWED,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "cohere2": {**_COMMON, **_WINDOWED, "logit_scale": 0.25},
    "phi3": {**_COMMON, "sliding_window": 5, "tie_word_embeddings": False},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": _INITIALIZER_RANGE,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_COMMON,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}

# Routers of this one hold a parameter that no gradient reaches.
UNREACHED = "ernie4_5_moe"

_SETTINGS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    UNREACHED: {
        **_COMMON,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
}


def save_model(
    folder: Path,
    architecture: str,
    tokenizer: PreTrainedTokenizerBase,
    change: Callable[[torch.nn.Module], None] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write a model folder with its tokenizer, weights in `dtype`; `change` may alter them, `settings` the config."""
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    values = {**_SETTINGS[architecture], **ids, "vocab_size": len(tokenizer), **settings}
    config = AutoConfig.for_model(architecture, **values)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        if change is not None:
            change(model)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
