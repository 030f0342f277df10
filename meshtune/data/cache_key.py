"""The name under which tokenised data is kept: a hash of everything that decides the tokens."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshtune.data.sources import Source

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

_FORMAT_VERSION = 6  # of what the cache holds: raise it when encoding or cutting changes its result
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def cache_key(section: DataSection, sources: Sequence[Source], tokenizer: Any, max_seq_length: int) -> str:
    """Return a hash of everything that decides the tokens: data, tokenizer, template, settings, code."""
    settings = {
        "version": _FORMAT_VERSION,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "sources": [(source.name, source.digest()) for source in sources],
        "format": section.format,
        "overlong": section.overlong,
        "train_on": section.train_on or "all",
        "reasoning": section.reasoning or "template",
        "max_seq_length": max_seq_length,
        "tokenizer": _tokenizer_digest(tokenizer),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_digest(tokenizer: Any) -> str:
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    if tokenizer.is_fast:
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    state: dict[str, Any] = {
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "added": {index: repr(token) for index, token in tokenizer.added_tokens_decoder.items()},
        "settings": {k: v for k, v in tokenizer.init_kwargs.items() if isinstance(v, bool | int | float | str)},
    }
    state["settings"].pop("name_or_path", None)  # where a tokenizer lies does not change what it does
    digest.update(json.dumps(state, sort_keys=True, default=repr).encode())
    return digest.hexdigest()
