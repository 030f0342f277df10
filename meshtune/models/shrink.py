"""A config made small: the same architecture in little, by the names that configs share and never by model names.

Widths and head counts are divided by one common factor, so that every relation between them holds and head sizes stay; or
head counts by less than widths, and head sizes by what is between. Layers are cut to a prefix that holds every kind of layer.
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
_RANK = re.compile(r"lora_rank$")
_HEAD_SIZE = re.compile(r"head_(dim|size)$|_d_head$|^kv_channels$|^d_kv$|^rotary_dim$")
_LAYERS = re.compile(r"^(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(de|en)coder_layers|num_blocks|depth)$")
_PATTERN = re.compile(r"layer|period|interval|every|pattern|sparse_step|offset|dense")
_WINDOWED = re.compile(r"window")
_SHARED = re.compile(r"shared_layers$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_ROUTES = re.compile(r"experts_per_tok|top_?k(_experts)?$|^moe_k$")
_GROUPS = re.compile(r"^(n_group|num_expert_group|topk_group)$")
_VOCABULARY = re.compile(r"vocab")
_TOKEN = re.compile(r"_(token_)?(id|index|ids)$")

_SMALL_VOCABULARY = 128
_NARROW = 16
_NARROW_FINE = 32
_SMALLEST_HEAD = 16
_FEW_EXPERTS = 8
_SHARING = 6

Values = dict[str, Any]


@dataclass(frozen=True)
class Degrees:
    """What is tried on a small model, so that it must not be smaller than that: counts of heads and of experts stay multiples
    of these where they were, and as many layers stay as there are stages."""

    heads: int = 1
    experts: int = 1
    layers: int = 2


@dataclass(frozen=True)
class Cut:
    """What is made small. `divisor` divides widths and head counts, but for `head_size`, a divisor of it, by which head sizes
    are divided and head counts are not."""

    divisor: int = 1
    layers: bool = True
    experts: bool = True
    vocabulary: bool = True
    head_size: int = 1
    degrees: Degrees = Degrees()

    @property
    def heads(self) -> int:
        return self.divisor // self.head_size


def fine_cuts(values: Values, degrees: Degrees) -> list[Cut]:
    """Cuts to the smallest models whose heads still fit `degrees`, the smallest first; the last leaves widths alone.

    Of grouped queries at least two heads a key stay, so that a mistake in the grouping shows.
    """
    sizes = [(name, v) for name, v in _integers(values) if v > 1]
    counts = [v for name, v in sizes if _HEADS.search(name) and _is_size(name) and not _is_kv(name)]
    keys = [v for name, v in sizes if _HEADS.search(name) and _is_kv(name)]
    widths = [(name, v) for name, v in sizes if _is_size(name) and not _HEADS.search(name) and v > 2]
    trunk = [v for name, v in widths if v >= _NARROW_FINE and "per_layer" not in name]
    head_sizes = [v for name, v in sizes if _is_head_size(name)]
    grouped = any(v < max(counts, default=0) for v in keys)
    least = degrees.heads * (2 if grouped else 1)

    def fits(divisor: int, size: int) -> bool:
        small = [h // divisor for h in counts]
        enough = all(s >= min(least, h) for s, h in zip(small, counts, strict=True))
        shared_out = all(h % degrees.heads or s % degrees.heads == 0 for s, h in zip(small, counts, strict=True))
        whole = all(w % (divisor * size) == 0 for _, w in widths) and all(
            w // (divisor * size) >= _NARROW_FINE for w in trunk
        )
        even = all(h // size >= _SMALLEST_HEAD and h // size % 2 == 0 for h in head_sizes if h >= _SMALLEST_HEAD)
        return enough and shared_out and whole and even

    halves = _common_divisors([w for _, w in widths] + head_sizes)
    found = [
        Cut(divisor * size, head_size=size, degrees=degrees)
        for divisor in _common_divisors(counts)
        for size in halves
        if fits(divisor, size)
    ]
    found.sort(key=lambda cut: (-cut.divisor, cut.head_size))
    return found if found and found[-1].divisor == 1 else [*found, Cut(degrees=degrees)]


def _common_divisors(numbers: list[int]) -> list[int]:
    common = math.gcd(*numbers)
    return [d for d in range(1, common + 1) if common % d == 0] or [1]


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
    kept = _layers_to_keep(values, count, cut.degrees.layers) if cut.layers and count else count
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
        return min(value, kept // 2, _SHARING)  # the last layers, which take keys and values from others of their kind
    return _small_integer(name, value, cut)


def _small_integer(name: str, value: int, cut: Cut) -> int:
    if cut.vocabulary and _VOCABULARY.search(name):
        return min(value, _SMALL_VOCABULARY - (value % cut.degrees.heads > 0))
    if cut.vocabulary and _TOKEN.search(name):
        return value if value < _SMALL_VOCABULARY else 0
    if cut.experts and _EXPERTS.search(name):
        return min(value, math.lcm(_FEW_EXPERTS, cut.degrees.experts))
    if cut.experts and _ROUTES.search(name):
        return min(value, 2)
    if cut.experts and _GROUPS.search(name):
        return min(value, 1)
    if _RANK.search(name) and cut.head_size > 1:
        return min(value, _NARROW_FINE)
    if _is_head_size(name):
        return value // cut.head_size if value % cut.head_size == 0 else value
    if _is_size(name):
        divisor = cut.heads if _HEADS.search(name) else cut.divisor
        few = min(value, cut.degrees.heads) if _is_kv(name) else 1
        return max(value // divisor, few) if value % divisor == 0 else few if _is_kv(name) else value
    if _INNER.search(name) and value > _NARROW:
        exact, rest = divmod(value, cut.divisor)
        step = _NARROW * cut.degrees.heads  # each rank's share stays as wide as kernels want it
        return exact if rest == 0 and cut.degrees.heads == 1 else math.ceil(exact / step) * step
    return value


def has_experts(values: Values) -> bool:
    """Whether a config has a mixture of experts."""
    return any(_EXPERTS.search(name) and value > 1 for name, value in _integers(values))


def _layer_count(values: Values) -> int:
    return next((v for k, v in values.items() if _LAYERS.search(str(k)) and type(v) is int), 0)


def _layers_to_keep(values: Values, count: int, least: int) -> int:
    """A prefix of the layers in which each kind occurs: kinds by lists with an entry a layer, by lists of layer indices, by
    overrides of single layers, and by periods and offsets."""
    needed = least
    by_layer = len(values.get("layer_types") or ()) == count
    for name, value in values.items():
        if isinstance(value, list | tuple) and _is_layer_index(name, value, count):
            needed = max(needed, value[0] + 2)
        elif isinstance(value, list | tuple) and len(value) == count:
            needed = max(needed, 1 + max(value.index(kind) for kind in value))
        elif name == "per_layer_config" and isinstance(value, dict) and value:
            needed = max(needed, 1 + min(int(layer) for layer in value))
        elif _is_pattern(name, by_layer) and type(value) is int and 1 < value < count - 1:
            needed = max(needed, value + 1)
    shared = any(_SHARED.search(str(name)) and value for name, value in values.items())
    return min(needed + min(needed, _SHARING) if shared else needed, count)


def _is_pattern(name: str, by_layer: bool) -> bool:
    """`by_layer`: a list says of each layer what a count of windowed layers would say again."""
    other = _LAYERS.search(name) or _SHARED.search(name) or (by_layer and _WINDOWED.search(name))
    return bool(_PATTERN.search(name)) and not other


def _is_layer_index(name: str, value: list | tuple, count: int) -> bool:
    """A list such as `full_attn_idxs: [2, 5, 8]`, of layers and not with an entry for each."""
    if not value or not re.search("layer|idx|index", name) or any(type(item) is not int for item in value):
        return False
    return list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < count


def _is_size(name: str) -> bool:
    if _INNER.search(name) or name.startswith("index_"):
        return False
    return bool(_WIDTH.search(name) or _HEADS.search(name))


def _is_head_size(name: str) -> bool:
    return bool(_HEAD_SIZE.search(name)) and not name.startswith("index_")


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
