"""What a source hands on: rows that carry a name a user can find again, and the reasons why some cannot be
used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a row is not used. `reason` is what rows are counted by; `detail` is the row's own part of it."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source: its name (`file:line`, `file:row N`) and its columns, or the problem of reading
    it.
    """

    name: str
    columns: dict[str, Any] | None
    problem: RowProblem | None = None


LEFT_OUT = RowProblem("left out by data.row_function")
"""Not a problem: the user's own function returned None for the row."""


class UnusableRow(Exception):
    """Raised inside this room where a row turns out to be unusable; the row is counted and named."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.problem = RowProblem(reason, detail)
