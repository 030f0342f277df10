"""Tokenised documents in flat arrays on disk, mapped into memory, and what is known of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshtune.data.prepared_rows import PreparedRows
from meshtune.data.report import DataReport


class TokenDataset(PreparedRows):
    """Documents 0 to len-1, in the order of their rows. Nothing is read before it is asked for.

    `fingerprint` is a hash of all tokens and flags; `lengths` [D] int64 are tokens of each document;
    `supervised_counts` [D] int64 its targets (supervised tokens that a position predicts: never the first
    token).
    """

    def __init__(self, folder: Path, fingerprint: str, report: DataReport) -> None:
        self.folder, self.fingerprint, self.report = folder, fingerprint, report
        self._offsets = np.fromfile(folder / "offsets.bin", dtype=np.int64)
        self._input_ids = np.memmap(folder / "input_ids.bin", dtype=np.int32, mode="r")
        self._supervised = np.memmap(folder / "supervised.bin", dtype=np.bool_, mode="r")
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        self.supervised_counts: NDArray[np.int64] = self._count_targets()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return (input_ids [T] int64, supervised [T] bool) of one document, as copies."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        window = slice(self._offsets[index], self._offsets[index + 1])
        return self._input_ids[window].astype(np.int64), np.array(self._supervised[window])

    def _count_targets(self) -> NDArray[np.int64]:
        starts = self._offsets[:-1]
        counts = np.add.reduceat(self._supervised, starts, dtype=np.int64)
        return counts - self._supervised[starts].astype(np.int64)
