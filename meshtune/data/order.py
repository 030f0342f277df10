"""The global order: which units make global batch k of an epoch, for any world size."""

from __future__ import annotations

from typing import Protocol

from meshtune.data.collate import Document
from meshtune.data.packing import DEFAULT_PACKING, PackingOptions
from meshtune.data.units import Unit, Units, permutation
from meshtune.errors import DataError

__all__ = ["Corpus", "GlobalOrder", "Unit", "permutation"]


class Corpus(Protocol):
    """Data that is tokens: it says what its units are."""

    def units(
        self,
        *,
        shuffle: bool,
        seed: int,
        packing: bool,
        max_seq_length: int | None,
        options: PackingOptions = DEFAULT_PACKING,
    ) -> Units:
        """Return the units in the order of each epoch. Raises DataError where the settings cannot be had."""
        ...


class GlobalOrder:
    """Units in the order in which training meets them. Global batch k is units k·G to (k+1)·G-1; an epoch's last may be
    short.
    """

    def __init__(
        self,
        dataset: Corpus,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        packing: bool = False,
        max_seq_length: int | None = None,
        drop_last: bool = False,
        options: PackingOptions = DEFAULT_PACKING,
    ) -> None:
        """Raises DataError if `drop_last` would leave no batch at all, or packing is asked for without a
        capacity.
        """
        self.global_batch_size, self.packing = global_batch_size, packing
        self._units = dataset.units(
            shuffle=shuffle, seed=seed, packing=packing, max_seq_length=max_seq_length, options=options
        )
        self.units = len(self._units)
        if drop_last and self.units < global_batch_size:
            raise DataError(
                f"{self.units} {self._units.kind} make no full global batch of {global_batch_size}, and drop_last "
                "leaves the short one out: nothing would be trained. Set drop_last: false, "
                "or a smaller global_batch_size"
            )
        whole = self.units - self.units % global_batch_size
        self.units_per_epoch = whole if drop_last else self.units

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch, a short last one included unless it is dropped."""
        return -(-self.units_per_epoch // self.global_batch_size)

    def batch(self, epoch: int, k: int) -> list[Unit]:
        """Return global batch k of an epoch: a list of units."""
        if not 0 <= k < self.batches_per_epoch:
            raise IndexError(f"batch {k} of {self.batches_per_epoch}")
        return self.window(epoch, k * self.global_batch_size)

    def window(self, epoch: int, start: int) -> list[Unit]:
        """Return the global batch that begins at unit `start` of an epoch; short at the epoch's end."""
        return self._units.between(epoch, start, min(start + self.global_batch_size, self.units_per_epoch))

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit, to be read by the rank that trains on it."""
        return self._units.documents(unit)

    def notes(self) -> list[str]:
        """Return what a user should know of how the units were formed, as lines."""
        return self._units.notes()
