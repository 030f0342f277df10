"""Where the tokens of a byte-level tokenizer stand in a text, from their ids alone.

Such a tokenizer writes every byte of the text into exactly one token, so the lengths of the tokens before it are a
token's place. That spares the offsets, which cost a tenth of tokenisation and a Python object for each token.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.data.encoding import Flags, Tokens
from meshtune.data.rendered import Span


class TokenBytes:
    """The length of each token of a tokenizer in bytes; `known` is false where tokens are not made of bytes."""

    def __init__(self, backend: Any) -> None:
        normalizer, splitting = backend.normalizer, repr(backend.pre_tokenizer)
        self._composes = normalizer is not None
        self.known = (
            "ByteLevel" in splitting
            and "add_prefix_space=True" not in splitting
            and (normalizer is None or type(normalizer).__name__ == "NFC")
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        )
        self._lengths = _lengths(backend) if self.known else np.zeros(0, dtype=np.int64)

    def supervised(self, text: str, ids: Tokens, spans: list[Span]) -> Flags | None:
        """Return [T] bool: which tokens hold a byte of a span (in characters, sorted and disjoint); None where the
        tokens do not add up to the text.
        """
        ascii_only = text.isascii()
        if self._composes and not ascii_only and not unicodedata.is_normalized("NFC", text):
            return None
        ends = np.cumsum(self._lengths[ids])
        size = len(text) if ascii_only else len(text.encode())
        if not len(ids) or ends[-1] != size:
            return None
        flags = np.zeros(len(ids), dtype=bool)
        for start, end in spans if ascii_only else _in_bytes(text, spans):
            first = np.searchsorted(ends, start, side="right")
            last = np.searchsorted(ends, end, side="left")
            flags[first : last + 1] = True
        return flags


def _lengths(backend: Any) -> NDArray[np.int64]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    for token, index in vocabulary.items():
        lengths[index] = len(token)  # one character of the byte alphabet for each byte
    for index, token in backend.get_added_tokens_decoder().items():
        lengths[index] = len(token.content.encode())
    return lengths


def _in_bytes(text: str, spans: list[Span]) -> list[Span]:
    found, at, size = [], 0, 0
    for start, end in spans:
        low = size + len(text[at:start].encode())
        high = low + len(text[start:end].encode())
        found.append((low, high))
        at, size = end, high
    return found
