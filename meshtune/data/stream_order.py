"""The global order of a stream: its blocks one after the other, each shuffled and packed on its own."""

from __future__ import annotations

from collections import deque

from meshtune.data.collate import Document
from meshtune.data.order import Cursor
from meshtune.data.packing import PackingOptions
from meshtune.data.stream import Stream
from meshtune.data.stream_blocks import Place
from meshtune.data.units import RowUnits, Unit
from meshtune.errors import DataError

_SEEDS_APART = 2**32
_BATCHES_KEPT = 8  # by so many a rank may be behind the one that removes what it has passed


class StreamOrder:
    """Global batch k depends on seed, data and settings alone: block b of an epoch is shuffled by (seed, b, epoch), and packs
    hold rows of one block. A batch may reach from one block into the next, and is short only at the stream's end. A unit is
    [epoch, block, *documents of the block].
    """

    def __init__(
        self,
        stream: Stream,
        global_batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        packing: bool,
        max_seq_length: int,
        drop_last: bool,
        max_documents: int | None,
    ) -> None:
        self.packing, self._stream, self._size = packing, stream, global_batch_size
        self._shuffle, self._seed, self._longest = shuffle, seed, max_seq_length
        self._drop_last, self._options = drop_last, PackingOptions("all", max_documents)
        self._open: dict[Place, RowUnits | None] = {}
        self._recent: deque[Place] = deque(maxlen=_BATCHES_KEPT)

    def take(self, cursor: Cursor) -> tuple[list[Unit], Cursor]:
        """Return the global batch at a cursor, and the cursor after it. Raises DataError where an epoch holds no batch."""
        epoch, block, at = cursor["epoch"], cursor.get("block", 0), cursor["units"]
        first, from_start = (epoch, block), (block, at) == (0, 0)
        units: list[Unit] = []
        while len(units) < self._size:
            found, end = self._units((epoch, block))
            if end:
                if units and not self._drop_last:
                    return self._taken(first, units), {"epoch": epoch + 1, "units": 0, "block": 0}
                if from_start:
                    raise DataError(
                        f"an epoch of the stream has {len(units)} units, which make no full global batch of {self._size}"
                        if units
                        else "no row of the stream can be used to train on"
                    )
                epoch, block, at, units, from_start = epoch + 1, 0, 0, [], True
                continue
            here = [] if found is None else found.between(epoch, at, at + self._size - len(units))
            units += [[epoch, block, *unit] for unit in here]
            at += len(here)
            if found is None or at >= len(found):
                block, at = block + 1, 0
        return self._taken(first, units), {"epoch": epoch, "units": at, "block": block}

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit."""
        found = self._open[unit[0], unit[1]]
        assert found is not None
        return found.documents(unit[2:])

    def names(self, unit: Unit) -> list[int | str]:
        """Return which documents of which block they are."""
        return [f"document {number} of block {unit[1]} of epoch {unit[0]}" for number in unit[2:]]

    def progress(self, cursor: Cursor) -> float:
        """Return the epochs that have been begun before this one: how long one is shows at its end."""
        return float(cursor["epoch"])

    def checked(self, cursor: Cursor) -> Cursor:
        """Return a saved cursor. Raises DataError for one that is not of a stream's course."""
        values = int(cursor["epoch"]), int(cursor["units"]), int(cursor.get("block", 0))
        if min(values) < 0:
            raise DataError(f"the saved data cursor is unit {values[1]} of block {values[2]} of epoch {values[0]}")
        return {"epoch": values[0], "units": values[1], "block": values[2]}

    def notes(self) -> list[str]:
        """Return how the first block was packed."""
        first = self._units((0, 0))[0]
        return [f"first block: {note}" for note in first.notes()] if first is not None else []

    def _units(self, place: Place) -> tuple[RowUnits | None, bool]:
        """The units of a block, None if it has none, and whether the stream ends before it."""
        if place not in self._open:
            found = self._stream.blocks.get(place)
            if found.end:
                return None, True
            self._open[place] = None
            if found.documents is not None:
                self._open[place] = found.documents.units(
                    shuffle=self._shuffle,
                    seed=self._seed + (place[1] + 1) * _SEEDS_APART,
                    packing=self.packing,
                    max_seq_length=self._longest,
                    options=self._options,
                )
        return self._open[place], False

    def _taken(self, first: Place, units: list[Unit]) -> list[Unit]:
        """Let go of blocks that lie behind the batches before this one."""
        if len(self._recent) == _BATCHES_KEPT:
            self._open = {place: found for place, found in self._open.items() if place >= self._recent[0]}
            self._stream.blocks.release(self._recent[0])
        self._recent.append(first)
        return units
