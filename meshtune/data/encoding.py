"""What an encoder is: rows in, tokens out, with a flag for each token: supervised or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshtune.data.rows import Row, RowProblem, UnusableRow

Tokens = NDArray[np.int32]
Flags = NDArray[np.bool_]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row's tokens: `input_ids` [T] int32 and `supervised` [T] bool, before any cut to the maximum
    length.
    """

    input_ids: Tokens
    supervised: Flags


class Encoder(Protocol):
    """Turns rows into tokens, in batches, each row on its own. It can be pickled and deep-copied.

    `seen` counts what the warnings are made of; counts of several encoders can be added up.
    """

    seen: Counter[Any]

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return, for each row in order, its tokens or the reason why there are none."""
        ...

    def warnings(self) -> list[str]:
        """Return what a user should know about the rows encoded so far."""
        ...


def columns_of(row: Row) -> dict[str, Any]:
    """Return a row's columns. Raises UnusableRow if it could not be read."""
    if row.columns is None:
        problem = row.problem or RowProblem("unreadable")
        raise UnusableRow(problem.reason, problem.detail)
    return row.columns


def check_unicode(text: str) -> None:
    """Raise UnusableRow for text that no tokenizer takes: JSON can hold half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRow("the text holds half a surrogate pair", f"character {error.start}") from error


def or_problem(make: Callable[[Row], Made], row: Row) -> Made | RowProblem:
    """Return what `make` makes of a row, or why it cannot."""
    try:
        return make(row)
    except UnusableRow as unusable:
        return unusable.problem
