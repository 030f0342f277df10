"""One stream's units in order, from any place: its blocks one after the other, each shuffled and packed on its own."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from meshtune.data.collate import Document
from meshtune.data.order import Cursor
from meshtune.data.packing import PackingOptions
from meshtune.data.stream_encoding import Place
from meshtune.data.units import RowUnits, Unit, UnitOptions
from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.stream import Stream

_SEEDS_APART = 2**32
_BATCHES_KEPT = 8  # by so many a rank may be behind the one that removes what it has passed


class StreamWalk:
    """Block b of an epoch is shuffled by (seed, b, epoch), and packs hold rows of one block. A unit is
    [epoch, block, *documents of the block].
    """

    def __init__(self, stream: Stream, options: UnitOptions) -> None:
        """`options.packing_options` bounds the documents of a pack; the window is always a whole block."""
        whole_block = PackingOptions("all", options.packing_options.max_documents)
        self._stream, self._options = stream, replace(options, packing_options=whole_block)
        self._open: dict[Place, RowUnits | None] = {}
        self._recent: deque[Place] = deque(maxlen=_BATCHES_KEPT)

    def take(self, cursor: Cursor, count: int) -> tuple[list[Unit], Cursor, bool]:
        """Return the next `count` units of a global batch, the cursor after them, and whether the stream has ended before there
        were so many: then the cursor is the start of the next epoch.
        """
        epoch, block, at = cursor["epoch"], cursor.get("block", 0), cursor["units"]
        units: list[Unit] = []
        while len(units) < count:
            found, end = self._units((epoch, block))
            self._stream.blocks.expect((epoch + 1, 0) if end else (epoch, block + 1))
            if end:
                return units, {"epoch": epoch + 1, "units": 0, "block": 0}, True
            here = [] if found is None else found.between(epoch, at, at + count - len(units))
            units += [[epoch, block, *unit] for unit in here]
            at += len(here)
            if found is None or at >= len(found):
                block, at = block + 1, 0
        return units, {"epoch": epoch, "units": at, "block": block}, False

    def let_go(self, cursor: Cursor) -> None:
        """Let go of blocks that lie behind the batches before this one, which begins at `cursor`."""
        if len(self._recent) == _BATCHES_KEPT:
            self._open = {place: found for place, found in self._open.items() if place >= self._recent[0]}
            self._stream.blocks.release(self._recent[0])
        self._recent.append((cursor["epoch"], cursor.get("block", 0)))

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit that `take` has returned for one of the last batches."""
        found = self._open[unit[0], unit[1]]
        assert found is not None
        return found.documents(unit[2:])

    def names(self, unit: Unit) -> list[int | str]:
        """Return which documents of which block they are."""
        return [f"document {number} of block {unit[1]} of epoch {unit[0]}" for number in unit[2:]]

    def notes(self) -> list[str]:
        """Return how the first block is packed."""
        first = self._units((0, 0))[0]
        return [] if first is None else [f"first block: {note}" for note in first.notes()]

    def _units(self, place: Place) -> tuple[RowUnits | None, bool]:
        """The units of a block, None if it has none, and whether the stream ends before it."""
        if place not in self._open:
            found = self._stream.blocks.get(place)
            if found.end:
                return None, True
            self._open[place] = None
            if found.documents is not None:
                seed = self._options.seed + (place[1] + 1) * _SEEDS_APART
                self._open[place] = found.documents.units(self._options.with_seed(seed))
        return self._open[place], False


def checked_place(cursor: Cursor) -> Cursor:
    """Return a saved cursor of a stream. Raises DataError for one that is not of a stream's course."""
    values = int(cursor["epoch"]), int(cursor["units"]), int(cursor.get("block", 0))
    if min(values) < 0:
        raise DataError(f"the saved data cursor is unit {values[1]} of block {values[2]} of epoch {values[0]}")
    return {"epoch": values[0], "units": values[1], "block": values[2]}
