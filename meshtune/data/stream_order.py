"""The global order of a stream: its blocks one after the other, each shuffled and packed on its own."""

from __future__ import annotations

from meshtune.data.collate import Document
from meshtune.data.order import Cursor
from meshtune.data.stream import Stream
from meshtune.data.stream_walk import StreamWalk, checked_place
from meshtune.data.units import Unit, UnitOptions
from meshtune.errors import DataError


class StreamOrder:
    """Global batch k depends on seed, data and settings alone; see StreamWalk. A batch may reach from one block into the next,
    and is short only at the stream's end.
    """

    def __init__(
        self, stream: Stream, global_batch_size: int, options: UnitOptions, *, drop_last: bool = False
    ) -> None:
        self.packing, self._size, self._drop_last = options.packing, global_batch_size, drop_last
        self._walk = StreamWalk(stream, options)

    def take(self, cursor: Cursor) -> tuple[list[Unit], Cursor]:
        """Return the global batch at a cursor, and the cursor after it. Raises DataError where an epoch holds no batch."""
        self._walk.let_go(cursor)
        units, following, ended = self._walk.take(cursor, self._size)
        if not ended or (units and not self._drop_last):
            return units, following
        if (cursor.get("block", 0), cursor["units"]) == (0, 0):
            raise DataError(
                f"an epoch of the stream has {len(units)} units, which make no full global batch of {self._size}"
                if units
                else "no row of the stream can be used to train on"
            )
        return self.take(following)

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit."""
        return self._walk.documents(unit)

    def names(self, unit: Unit) -> list[int | str]:
        """Return which documents of which block they are."""
        return self._walk.names(unit)

    def progress(self, cursor: Cursor) -> float:
        """Return the epochs that have been begun before this one: how long one is shows at its end."""
        return float(cursor["epoch"])

    def checked(self, cursor: Cursor) -> Cursor:
        """Return a saved cursor. Raises DataError for one that is not of a stream's course."""
        return checked_place(cursor)

    def notes(self) -> list[str]:
        """Return how the first block was packed."""
        return self._walk.notes()
