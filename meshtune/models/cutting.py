"""Why a model of given sizes cannot have its sequences cut over ranks, which a small twin of it would not show."""

from __future__ import annotations

import math
import re
from typing import Any

from meshtune.models.source import Source

_ATTENTION_DROPOUT = re.compile(r"att(ention|n)_.*drop")


def cannot_be_cut(source: Source, longest: int, size: int, method: str) -> str | None:
    """The reason and what would work, or None. `longest` is the most tokens that a document may have."""
    if source.section.attention not in ("auto", "sdpa"):
        return f"attention over ranks is ours; write `model.attention: auto`, not {source.section.attention}"
    config = source.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if method == "ulysses" and isinstance(heads, int) and heads % size:
        return f"its {heads} attention heads cannot be shared out over {size} ranks; write `cp_method: allgather` or `ring`"
    dropouts = [name for name, value in config.to_dict().items() if _ATTENTION_DROPOUT.match(name) and value]
    if method == "ring" and dropouts:
        return f"its config sets {dropouts[0]}, which ring attention cannot do; set it to 0, or write `cp_method: allgather`"
    short = _short_positions(getattr(config, "rope_parameters", None) or {})
    if longest > short:
        return (
            f"its rotary positions are others for documents of more than {short} tokens, and a rank does not see how long they "
            f"are; write `data.max_seq_length: {short}` or less, or `cp_size: 1`"
        )
    return None


def _short_positions(parameters: dict[str, Any]) -> float:
    """Up to which length a config with two sets of rotary frequencies has those for short documents; it may have one pair of
    sets for each kind of layer."""
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = [one.get("original_max_position_embeddings") for one in sets if one.get("rope_type") == "longrope"]
    return min((limit for limit in limits if limit), default=math.inf)
