"""What preparation did with the rows: how many were used, which were not and why, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from meshtune.data.rows import LEFT_OUT, RowProblem

NAMES_KEPT = 20
_SOURCES_SHOWN = 8
_PERCENTILES = (5, 50, 95, 100)
_COUNTS = (
    "rows_read",
    "rows_used",
    "left_out",
    "documents",
    "truncated",
    "split",
    "dropped_overlong",
    "windows_without_target",
    "tokens_left_out",
    "tokens",
    "supervised_tokens",
)


@dataclass
class Unusable:
    """The rows that one reason made unusable: all counted, the first ones named."""

    count: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class DataReport:
    """Counts of one prepared data set. `rows_read == rows_used + dropped_overlong + rows_unusable +
    left_out`, the last being those for which the user's own function returned None.

    `tokens` and `supervised_tokens` are of the documents kept, the latter counting targets: never a first
    token; `tokens_left_out` are tokens of rendered rows that were cut off or dropped.
    """

    sources: list[str] = field(default_factory=list)
    format: str = ""
    max_seq_length: int = 0
    rows_read: int = 0
    rows_used: int = 0
    left_out: int = 0
    documents: int = 0
    truncated: int = 0
    split: int = 0
    dropped_overlong: int = 0
    windows_without_target: int = 0
    tokens_left_out: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    length_percentiles: dict[str, int] = field(default_factory=dict)
    unusable: dict[str, Unusable] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def rows_unusable(self) -> int:
        """Number of rows that could not be used, over all reasons."""
        return sum(item.count for item in self.unusable.values())

    @property
    def named(self) -> str:
        """The sources in a line: all of a few, the first ones of many."""
        shown = self.sources if len(self.sources) <= _SOURCES_SHOWN + 1 else self.sources[:_SOURCES_SHOWN]
        rest = len(self.sources) - len(shown)
        return ", ".join(shown) + (f" and {rest:,} more" if rest else "")

    def reject(self, name: str, problem: RowProblem) -> None:
        """Count an unusable row under its reason, and keep its name if it is among the first; one left out by the user's
        function, only count.
        """
        if problem == LEFT_OUT:
            self.left_out += 1
            return
        item = self.unusable.setdefault(problem.reason, Unusable())
        item.count += 1
        if len(item.names) < NAMES_KEPT:
            item.names.append(f"{name} ({problem.detail})" if problem.detail else name)

    def add(self, other: DataReport) -> None:
        """Add the counts of rows that come after those of this report."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        formats = [name for report in (self, other) for name in report.format.split(", ") if name]
        self.format = ", ".join(dict.fromkeys(formats))
        for reason, theirs in other.unusable.items():
            item = self.unusable.setdefault(reason, Unusable())
            item.count += theirs.count
            item.names += theirs.names[: NAMES_KEPT - len(item.names)]

    def measure(self, lengths: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Set the percentiles of the document lengths, in tokens."""
        values = np.percentile(lengths, _PERCENTILES, method="nearest")
        self.length_percentiles = {f"p{p}": int(v) for p, v in zip(_PERCENTILES, values, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataReport:
        """Return the report that `as_dict` was made of."""
        unusable = {reason: Unusable(**item) for reason, item in values["unusable"].items()}
        return cls(**{**values, "unusable": unusable})

    def summary(self) -> list[str]:
        """Return the report as lines of text, the unusable rows by name."""
        lines = [
            f"{self.named}: {self.rows_used:,} of {self.rows_read:,} rows used "
            f"as `{self.format}`, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised"
        ]
        if self.length_percentiles:
            shown = ", ".join(f"{name} {value:,}" for name, value in self.length_percentiles.items())
            lines.append(f"lengths in tokens: {shown} (max_seq_length {self.max_seq_length:,})")
        if self.left_out:
            lines.append(f"{self.left_out:,} rows left out by data.row_function")
        lines += self._overlong_lines()
        lines += self.unusable_lines()
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def unusable_lines(self) -> list[str]:
        """Return one line for each reason: its count and the first rows by name."""
        return [
            f"{item.count:,} rows unusable, {reason}: {', '.join(item.names)}"
            + (f" and {item.count - len(item.names):,} more" if item.count > len(item.names) else "")
            for reason, item in self.unusable.items()
        ]

    def _overlong_lines(self) -> list[str]:
        lines = []
        if self.truncated:
            lines.append(f"{self.truncated:,} rows truncated to max_seq_length")
        if self.split:
            lines.append(f"{self.split:,} rows split into consecutive ones")
        if self.windows_without_target:
            lines.append(f"{self.windows_without_target:,} parts of split rows left out: nothing to learn in them")
        if self.dropped_overlong:
            lines.append(f"{self.dropped_overlong:,} rows dropped: longer than max_seq_length")
        if self.tokens_left_out:
            lines.append(f"{self.tokens_left_out:,} tokens left out of rows too long or with nothing to learn")
        return lines
