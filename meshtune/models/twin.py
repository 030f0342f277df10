"""A shrunk twin of a model: same architecture, every kind of layer kept once, small sizes, random weights.

What no declaration states is tried on it before any weight is read. Works on any config class by the names that configs
share; a config that is small already is its own twin.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from meshtune.errors import ModelError
from meshtune.models.source import Source

_SMALL_ENOUGH = 20_000_000
_HEADS = 4

_SMALL: dict[str, int] = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "num_attention_heads": _HEADS,
    "n_head": _HEADS,
    "num_heads": _HEADS,
    "head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "word_embed_proj_dim": 64,
}

# Always cut, or a short test row would never reach beyond them.
_REACH: dict[str, int] = {"sliding_window": 4, "attention_chunk_size": 4, "window_size": 4, "index_topk": 4}


def _cut_reach(config: PreTrainedConfig) -> None:
    """Windows shorter than a test row, and no dropout, which would make two runs differ."""
    for section in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, small in _REACH.items():
            value = getattr(section, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > small:
                _set(section, name, small)
        for name, value in list(vars(section).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                _set(section, name, 0.0)


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` with small sizes. Sizes that a config does not have, or that are smaller already, stay."""
    values = copy.deepcopy(config)
    _shrink_section(values)
    text = values.get_text_config(decoder=True)
    if text is not values:
        _shrink_section(text)
    return values


def _shrink_section(config: PreTrainedConfig) -> None:
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    for name, small in _SMALL.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > small:
            _set(config, name, small)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        _set(config, "num_key_value_heads", 1 if kv_heads == 1 else _HEADS if kv_heads == heads else 2)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            _set(config, name, 1)
    _keep_each_kind_of_layer(config)


def _keep_each_kind_of_layer(config: PreTrainedConfig) -> None:
    name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if _first(config, n)), None)
    if name is None:
        return
    count = getattr(config, name)
    kinds = getattr(config, "layer_types", None)
    kept = sorted({kinds.index(kind) for kind in kinds}) if kinds else list(range(min(2, count)))
    if len(kept) == 1 and count > 1:
        kept.append(kept[0] + 1)
    for attribute, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and count > len(kept):
            _set(config, attribute, [value[index] for index in kept])
    _set(config, name, len(kept))
    dense = getattr(config, "first_k_dense_replace", None)
    if isinstance(dense, int):
        _set(config, "first_k_dense_replace", min(dense, 1))


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError):
        return  # a property that follows from the others


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def twin(source: Source, attention: str, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A twin of `source` with random weights on `device`, in eval mode. Raises ModelError if none can be built."""
    config = copy.deepcopy(source.config)
    try:
        if _parameter_count(source, config) > _SMALL_ENOUGH:
            config = shrink(config)
            count = _parameter_count(source, config)
            if count > _SMALL_ENOUGH:
                raise ValueError(f"shrunk, it still has {count:,} parameters")
    except Exception as error:
        raise _no_twin(source, error) from error
    _cut_reach(config)
    config.dtype = dtype
    config._attn_implementation = attention
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return source.model_class(config).to(device=device, dtype=dtype).eval()
    except Exception as error:
        raise _no_twin(source, error) from error


def _no_twin(source: Source, error: Exception) -> ModelError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return ModelError(f"no small twin of {source.model_class.__name__} could be built to try it on ({reason})")


def _parameter_count(source: Source, config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in source.model_class(copy.deepcopy(config)).parameters())
