"""Rows of the training data that are kept apart for validation."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshtune.data.collate import Document
from meshtune.data.prepared_rows import PreparedRows
from meshtune.data.report import DataReport
from meshtune.data.units import permutation
from meshtune.errors import DataError

_STREAM = 2**40  # of the random numbers that choose: no epoch has this number


class Rows(Protocol):
    """Prepared rows, of one source or several."""

    lengths: NDArray[np.int64]
    supervised_counts: NDArray[np.int64]

    @property
    def fingerprint(self) -> str: ...

    @property
    def report(self) -> DataReport: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


class Subset(PreparedRows):
    """Some documents of prepared rows, in their order, as a data set of its own."""

    def __init__(self, whole: Rows, indices: NDArray[np.int64], report: DataReport) -> None:
        self._whole, self._indices = whole, indices
        self.lengths: NDArray[np.int64] = whole.lengths[indices]
        self.supervised_counts: NDArray[np.int64] = whole.supervised_counts[indices]
        self.report = replace(
            report,
            documents=len(indices),
            tokens=int(self.lengths.sum()),
            supervised_tokens=int(self.supervised_counts.sum()),
        )
        chosen = hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
        self.fingerprint = f"{whole.fingerprint}-{chosen}"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self._whole[int(self._indices[index])]


def hold_out(rows: Rows, size: float, seed: int, split_at: int | None) -> tuple[Subset, Subset]:
    """Return (training, validation): `size` of the rows, a fraction if it is below 1, else a count, chosen by the seed.

    `split_at` is the length in tokens at which overlong rows were split, if they were: parts of one text stay together.
    Raises DataError if nothing would be left to train on.
    """
    begins = np.ones(len(rows), dtype=bool)
    if split_at is not None:
        begins[1:] = rows.lengths[:-1] < split_at
    texts = np.cumsum(begins) - 1
    count = int(texts[-1]) + 1
    wanted = max(1, round(size * count)) if size < 1 else int(size)
    if wanted >= count:
        raise DataError(
            f"data.validation_size is {size:g}, but there are {count:,} rows in all, and some must be left to train on"
        )
    chosen = np.zeros(count, dtype=bool)
    chosen[permutation(count, seed, _STREAM)[:wanted]] = True
    held = chosen[texts]
    report = DataReport(
        [f"{wanted:,} rows held out of {', '.join(rows.report.sources[:3])}"],
        rows.report.format,
        rows.report.max_seq_length,
        rows_read=wanted,
        rows_used=wanted,
    )
    training, validation = Subset(rows, _places(~held), rows.report), Subset(rows, _places(held), report)
    if not int(validation.supervised_counts.sum()):
        raise DataError("data.validation_size: no token of the rows held out is supervised; hold out more")
    return training, validation


def _places(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(chosen).astype(np.int64)
