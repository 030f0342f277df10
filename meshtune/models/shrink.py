"""A config made small: the same architecture in little, by the names that configs share and never by model names.

Widths and head counts are divided by one common factor, so that every relation between them holds and head sizes stay.
Layers are cut to a prefix that holds every kind of layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WIDTH = re.compile(r"hidden_size|d_model|n_embd|emb(ed)?(ding)?_(dim|size)|embed_proj_dim|lru_width|d_ssm")
_INNER = re.compile(r"intermediate|ffn|feed_forward_size|inner|d_ff$|^dff$|dim_ff|mlp_dim")
_HEADS = re.compile(r"heads$|n_head$")
_LAYERS = re.compile(r"^(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(de|en)coder_layers|num_blocks|depth)$")
_PATTERN = re.compile(r"layer|period|interval|every|pattern|sparse_step|offset|dense")
_SHARED = re.compile(r"shared_layers$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_ROUTES = re.compile(r"experts_per_tok|top_?k(_experts)?$|^moe_k$")
_GROUPS = re.compile(r"^(n_group|num_expert_group|topk_group)$")
_VOCABULARY = re.compile(r"vocab")
_TOKEN = re.compile(r"_(token_)?(id|index|ids)$")

_SMALL_VOCABULARY = 128
_NARROW = 16
_FEW_EXPERTS = 8

Values = dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """What is made small. `divisor` divides widths and head counts."""

    divisor: int = 1
    layers: bool = True
    experts: bool = True
    vocabulary: bool = True


def divisors(values: Values) -> list[int]:
    """Some divisors that all widths and head counts of a config share: the largest, and each at most half of the one before,
    down to 1. Widths stay above a minimum. Inner widths of feed-forward layers need not be divisible."""
    common, narrowest = 0, 0
    for name, value in _integers(values):
        if _is_size(name) and value > 2 and not _is_kv(name):
            common = math.gcd(common, value)
            if not _HEADS.search(name) and value >= _NARROW:
                narrowest = min(narrowest or value, value)
    found, limit = [], min(common, narrowest // _NARROW)
    while limit > 1:
        found.append(next(d for d in range(limit, 0, -1) if common % d == 0))
        limit = found[-1] // 2
    return found if found and found[-1] == 1 else [*found, 1]


def shrink(values: Values, cut: Cut) -> Values:
    """A config as a dictionary, cut in every section. Sizes that are small already stay."""
    count = _layer_count(values)
    kept = _layers_to_keep(values, count) if cut.layers and count else count
    return {name: _shrunk(str(name), value, count, kept, cut) for name, value in values.items()}


def _shrunk(name: str, value: Any, count: int, kept: int, cut: Cut) -> Any:
    if isinstance(value, dict):
        if name == "per_layer_config":
            return {key: shrink(section, cut) for key, section in value.items() if int(key) < kept}
        return shrink(value, cut)
    if isinstance(value, list | tuple):
        if _is_layer_index(name, value, count):
            return [index for index in value if index < kept]
        value = value[:kept] if count and len(value) == count else value
        return [_shrunk(name, item, 0, 0, cut) for item in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _LAYERS.search(name):
        return min(value, kept) if value == count else value
    if _SHARED.search(name) and kept < count:
        return min(
            value, kept // 2
        )  # the last layers, which take keys and values from layers of their kind before them
    return _small_integer(name, value, cut)


def _small_integer(name: str, value: int, cut: Cut) -> int:
    if cut.vocabulary and _VOCABULARY.search(name):
        return min(value, _SMALL_VOCABULARY)
    if cut.vocabulary and _TOKEN.search(name):
        return value if value < _SMALL_VOCABULARY else 0
    if cut.experts and _EXPERTS.search(name):
        return min(value, _FEW_EXPERTS)
    if cut.experts and _ROUTES.search(name):
        return min(value, 2)
    if cut.experts and _GROUPS.search(name):
        return min(value, 1)
    if _is_size(name):
        return value // cut.divisor if value % cut.divisor == 0 else 1 if _is_kv(name) else value
    if _INNER.search(name) and value > _NARROW:
        exact, rest = divmod(value, cut.divisor)
        return exact if rest == 0 else math.ceil(exact / _NARROW) * _NARROW
    return value


def _layer_count(values: Values) -> int:
    return next((v for k, v in values.items() if _LAYERS.search(str(k)) and type(v) is int), 0)


def _layers_to_keep(values: Values, count: int) -> int:
    """A prefix of the layers in which each kind occurs: kinds by lists with an entry a layer, by lists of layer indices, by
    overrides of single layers, and by periods and offsets."""
    needed = 2
    for name, value in values.items():
        if isinstance(value, list | tuple) and _is_layer_index(name, value, count):
            needed = max(needed, value[0] + 2)
        elif isinstance(value, list | tuple) and len(value) == count:
            needed = max(needed, 1 + max(value.index(kind) for kind in value))
        elif name == "per_layer_config" and isinstance(value, dict) and value:
            needed = max(needed, 1 + min(int(layer) for layer in value))
        elif _is_pattern(name) and type(value) is int and 1 < value < count:
            needed = max(needed, value + 1)
    shared = any(_SHARED.search(str(name)) and value for name, value in values.items())
    return min(2 * needed if shared else needed, count)


def _is_pattern(name: str) -> bool:
    return bool(_PATTERN.search(name)) and not (_LAYERS.search(name) or _SHARED.search(name))


def _is_layer_index(name: str, value: list | tuple, count: int) -> bool:
    """A list such as `full_attn_idxs: [2, 5, 8]`, of layers and not with an entry for each."""
    if not value or not re.search("layer|idx|index", name) or any(type(item) is not int for item in value):
        return False
    return list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < count


def _is_size(name: str) -> bool:
    if _INNER.search(name) or name.startswith("index_"):
        return False
    return bool(_WIDTH.search(name) or _HEADS.search(name))


def _is_kv(name: str) -> bool:
    return "kv" in name or "key_value" in name


def _integers(values: Values) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _integers(value)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            if type(item) is int:
                yield str(name), item
