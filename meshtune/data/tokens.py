"""The encoder of rows that are token ids already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.data.conversions import decoded
from meshtune.data.encoding import Encoded, Flags, columns_of, or_problem
from meshtune.data.rows import Row, RowProblem, UnusableRow

IGNORED = -100
_MASKS = ("assistant_masks", "completion_mask", "loss_mask")


class TokensEncoder:
    """`tokens` rows: `input_ids` as they are. Learnt is what `labels` repeat (-100 elsewhere, not shifted) and every mask
    of the row has at 1; all tokens, where it has neither. Positions whose `attention_mask` is 0 are padding, and left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._vocabulary = len(tokenizer)
        self.seen: Counter[Any] = Counter()

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        return [or_problem(self._encoded, row) for row in rows]

    def warnings(self) -> list[str]:
        """Return no warning: what these rows hold was decided elsewhere."""
        return []

    def _encoded(self, row: Row) -> Encoded:
        columns = columns_of(row)
        ids = _integers(columns, "input_ids")
        if ids is None or not len(ids):
            raise UnusableRow("`input_ids` is empty" if ids is not None else "no column `input_ids`")
        outside = np.flatnonzero((ids < 0) | (ids >= self._vocabulary))
        if len(outside):
            where = f"{ids[outside[0]]} at position {outside[0]}, the tokenizer has {self._vocabulary:,} tokens"
            raise UnusableRow("a token id is outside the vocabulary", where)
        supervised = _supervised(columns, ids)
        real = _flags(columns, "attention_mask", len(ids))
        kept = slice(None) if real is None else real
        return Encoded(ids[kept].astype(np.int32), supervised[kept])


def _supervised(columns: dict[str, Any], ids: NDArray[np.int64]) -> Flags:
    supervised = np.ones(len(ids), dtype=bool)
    labels = _integers(columns, "labels", len(ids))
    if labels is not None:
        supervised = labels != IGNORED
        wrong = np.flatnonzero(supervised & (labels != ids))
        if len(wrong):
            at = wrong[0]
            detail = f"position {at}: label {labels[at]}, token {ids[at]}; labels are not shifted here"
            raise UnusableRow("a label is neither -100 nor its own token", detail)
    for name in _MASKS:
        mask = _flags(columns, name, len(ids))
        if mask is not None:
            supervised = supervised & mask
    return supervised


def _flags(columns: dict[str, Any], name: str, length: int) -> Flags | None:
    values = _integers(columns, name, length)
    if values is None:
        return None
    if not np.isin(values, (0, 1)).all():
        raise UnusableRow(f"`{name}` holds what is neither 0 nor 1")
    return values.astype(bool)


def _integers(columns: dict[str, Any], name: str, length: int | None = None) -> NDArray[np.int64] | None:
    """Return a column of integers, [T] int64, or None where the row has it not. Raises UnusableRow."""
    values = decoded(columns.get(name))
    if values is None:
        return None
    try:
        array = np.asarray(values if isinstance(values, list) else None)
    except ValueError:  # lists of unequal lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise UnusableRow(f"`{name}` is not a list of integers")
    if length is not None and len(array) != length:
        raise UnusableRow(f"`{name}` is not as long as `input_ids`", f"{len(array)} and {length}")
    return array.astype(np.int64)
