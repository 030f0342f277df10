"""The encoder of `text` rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtune.data.encoding import Encoded, check_unicode, columns_of, or_problem
from meshtune.data.formats import plain_text
from meshtune.data.rows import Row, RowProblem


class TextEncoder:
    """`text` rows: the tokenizer's own special tokens, then one end of sequence; all tokens supervised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.seen: Counter[Any] = Counter()
        self._eos = tokenizer.eos_token_id

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        texts = [or_problem(_checked_text, row) for row in rows]
        usable = [text for text in texts if isinstance(text, str)]
        ids = iter(self._tokenizer(usable, return_attention_mask=False, verbose=False)["input_ids"] if usable else [])
        return [text if isinstance(text, RowProblem) else self._encoded(next(ids)) for text in texts]

    def warnings(self) -> list[str]:
        """Return a warning if texts get no end of sequence, because the tokenizer names none."""
        if self._eos is None:
            return ["the tokenizer names no end-of-sequence token: the model will not learn where a text ends"]
        return []

    def _encoded(self, ids: list[int]) -> Encoded:
        if self._eos is not None and (not ids or ids[-1] != self._eos):
            ids = [*ids, self._eos]
        return Encoded(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))


def _checked_text(row: Row) -> str:
    text = plain_text(columns_of(row))
    check_unicode(text)
    return text
