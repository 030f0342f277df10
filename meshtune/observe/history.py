"""Reads a `metrics.jsonl` back, however the run that wrote it ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Point = tuple[float, float | None]

_VALIDATION_LOSS = re.compile("validation_(.+_)?loss")


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one line, or None where the line is torn or holds no whole number `step`."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return row


@dataclass(frozen=True)
class History:
    """The lines of a run: `train` those with a loss, `validation` those of a validation, in file order."""

    train: Sequence[dict[str, Any]] = ()
    validation: Sequence[dict[str, Any]] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> History:
        """Read `metrics.jsonl`; a missing file is an empty history and a torn line is passed over."""
        try:
            lines = Path(path).read_bytes().splitlines()
        except FileNotFoundError:
            return cls()
        rows = [row for row in map(parse_line, lines) if row is not None]
        return cls(
            train=[row for row in rows if "loss" in row],
            validation=[row for row in rows if is_validation(row)],
        )

    @property
    def validation_losses(self) -> dict[str, list[Point]]:
        """`(step, loss)` of each validation set, by `validation` or `validation <name of the set>`."""
        names = dict.fromkeys(name for row in self.validation for name in row if _VALIDATION_LOSS.fullmatch(name))
        return {_set_of(name): points(self.validation, name) for name in names}


def is_validation(metrics: Iterable[str]) -> bool:
    """Whether metrics of these names are of a validation."""
    return any(name.startswith("validation_") for name in metrics)


def _set_of(name: str) -> str:
    return name.removesuffix("_loss").replace("_", " ", 1)


def points(rows: Iterable[dict[str, Any]], name: str) -> list[Point]:
    """`(step, value)` of each line that carries `name`; the value is None where it was written as null."""
    found = [(float(row["step"]), row[name]) for row in rows if name in row]
    return [(step, float(v) if isinstance(v, (int, float)) else None) for step, v in found]


def smoothed(values: Sequence[Point], fraction: float = 0.03) -> list[Point]:
    """Exponential moving average over about `fraction` of the points, without the pull of a zero start.

    Bias correction as in Adam (Kingma & Ba 2015, section 3). Nulls are passed over.
    """
    known = [(step, value) for step, value in values if value is not None]
    decay = 1.0 - 1.0 / max(1.0, fraction * len(known))
    result: list[Point] = []
    average = weight = 0.0
    for step, value in known:
        average = decay * average + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        result.append((step, average / weight))
    return result
