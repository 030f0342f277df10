"""What every set of prepared rows can say of itself from its lengths, wherever its documents lie."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from meshtune.data.collate import Document
from meshtune.data.units import RowUnits, UnitOptions


class PreparedRows(ABC):
    """Documents by index. `lengths` [D] int64 are tokens of each; `supervised_counts` [D] int64 its targets."""

    lengths: NDArray[np.int64]
    supervised_counts: NDArray[np.int64]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Document: ...

    @property
    def mean_length(self) -> float:
        """Tokens of the document in which the average token stands."""
        return float(np.square(self.lengths, dtype=np.float64).sum() / max(int(self.lengths.sum()), 1))

    @property
    def supervised_share(self) -> float:
        """Targets per token, 0 to 1."""
        return int(self.supervised_counts.sum()) / max(int(self.lengths.sum()), 1)

    def units(self, options: UnitOptions) -> RowUnits:
        """Return the rows, or packs of them, in the order of each epoch."""
        return RowUnits(self, options)
