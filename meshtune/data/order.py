"""The global order: which units make global batch k of an epoch, for any world size."""

from __future__ import annotations

from typing import NotRequired, Protocol, TypedDict

from meshtune.data.collate import Document
from meshtune.data.packing import DEFAULT_PACKING, PackingOptions
from meshtune.data.units import Corpus, Unit, UnitOptions, permutation
from meshtune.errors import DataError

__all__ = ["Cursor", "GlobalOrder", "Order", "Unit", "permutation"]


class Cursor(TypedDict):
    """Where a run stands in the global order: the epoch, and the units of it that have been consumed; of a stream, those of its
    block `block`; of several streams, how many units each has given (`taken`), and the place in each (`sources`).
    """

    epoch: int
    units: int
    block: NotRequired[int]
    taken: NotRequired[list[int]]
    sources: NotRequired[list[Cursor]]


class Order(Protocol):
    """Gives one global batch after another, from a cursor that knows no world size."""

    packing: bool

    def take(self, cursor: Cursor) -> tuple[list[Unit], Cursor]:
        """Return the global batch at a cursor, and the cursor after it."""
        ...

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit, to be read by the rank that trains on it."""
        ...

    def names(self, unit: Unit) -> list[int | str]:
        """Return how a user finds what is in a unit; see `Units.names`."""
        ...

    def progress(self, cursor: Cursor) -> float:
        """Return how many epochs lie before a cursor; 1.5 is half-way through the second."""
        ...

    def checked(self, cursor: Cursor) -> Cursor:
        """Return a saved cursor as a place in this order. Raises DataError for one that cannot be."""
        ...

    def notes(self) -> list[str]:
        """Return what a user should know of how the units were formed, as lines."""
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
        self._units = dataset.units(UnitOptions(shuffle, seed, packing, max_seq_length, options))
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

    def take(self, cursor: Cursor) -> tuple[list[Unit], Cursor]:
        """Return the global batch at a cursor, and the cursor after it; after an epoch's last the start of the next."""
        units = self.window(cursor["epoch"], cursor["units"])
        return units, self._normal(cursor["epoch"], cursor["units"] + len(units))

    def names(self, unit: Unit) -> list[int | str]:
        """Return how a user finds what is in a unit; see `Units.names`."""
        return self._units.names(unit)

    def progress(self, cursor: Cursor) -> float:
        """Return how many epochs lie before a cursor; 1.5 is half-way through the second."""
        return cursor["epoch"] + cursor["units"] / self.units_per_epoch

    def checked(self, cursor: Cursor) -> Cursor:
        """Return a saved cursor as a place in this order. Raises DataError for one that cannot be."""
        epoch, units = int(cursor["epoch"]), int(cursor["units"])
        if epoch < 0 or not 0 <= units <= self.units:
            raise DataError(
                f"the saved data cursor is unit {units} of epoch {epoch}, but an epoch has "
                f"{self.units} units now: data, packing or lengths have changed since the checkpoint"
            )
        return self._normal(epoch, units)

    def _normal(self, epoch: int, units: int) -> Cursor:
        return {"epoch": epoch + 1, "units": 0} if units >= self.units_per_epoch else {"epoch": epoch, "units": units}

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit, to be read by the rank that trains on it."""
        return self._units.documents(unit)

    def notes(self) -> list[str]:
        """Return what a user should know of how the units were formed, as lines."""
        return self._units.notes()
