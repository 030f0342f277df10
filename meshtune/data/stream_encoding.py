"""Blocks of a stream read and encoded: in the thread that asks for them, or by processes that work ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice

from meshtune.data.blocks import RowBlock
from meshtune.data.encode_block import BlockEncoder, EncodedBlock
from meshtune.data.reading import Reading
from meshtune.data.rows import Row
from meshtune.data.sources import Source
from meshtune.data.workers import default_workers, encode_in_order

_PIECE_ROWS = 256
_CORES_A_PROCESS, _MOST_PROCESSES = 4, 8

Place = tuple[int, int]
"""An epoch, and the number of a block in it."""


def processes_for(asked: int | None, share: float = 1.0) -> int:
    """Return how many processes encode a stream that has a share of all rows; 0: none but the run's own.

    `asked` is data.num_workers. Unless that says it, training keeps the cores to itself where they are few.
    """
    count = min(default_workers() // _CORES_A_PROCESS, _MOST_PROCESSES) if asked is None else asked
    return 0 if count <= 1 else max(1, round(count * share))


class Reader:
    """Reads rows on from where it stopped; rows of blocks that are passed over are read, and not encoded."""

    def __init__(self, sources: Sequence[Source], rows: int) -> None:
        self._sources, self._rows = sources, rows
        self._next: Place | None = None
        self._written: Iterator[Row] = iter(())

    @property
    def reading(self) -> Reading:
        """What lies between what is written and the rows."""
        return self._sources[0].reading

    def read(self, place: Place) -> list[Row]:
        """Return the rows of a block, fewer at the stream's end."""
        epoch, number = place
        if self._next is None or self._next[0] != epoch or self._next[1] > number:
            self._written, self._next = chain.from_iterable(source.written() for source in self._sources), (epoch, 0)
        for _ in islice(self._written, (number - self._next[1]) * self._rows):
            pass
        self._next = epoch, number + 1
        return list(islice(self._written, self._rows))


class StreamEncoder:
    """Encodes blocks one after the other, the same whoever works on them. The first is encoded here: many streams have no
    other, and what the encoder learns from it of the template need not be found out again for each that follows. For those
    processes are started, which go on with the blocks, and over the stream's end, before they are asked for.
    """

    def __init__(self, reader: Reader, encoder: BlockEncoder, processes: int) -> None:
        self._reader, self._encoder, self._processes = reader, encoder, processes
        self._encode = encoder.warm_up
        self._ahead: Iterator[EncodedBlock] = iter(())
        self._next: Place | None = None
        self._pieces: dict[Place, int] = {}
        self._ready: deque[EncodedBlock] = deque()

    def encode(self, place: Place) -> list[EncodedBlock]:
        """Return a block in pieces, none where the stream ends before it. Raises DataError for what preparation refuses."""
        if self._processes == 0 or self._encode == self._encoder.warm_up:
            rows, encode = self._reader.read(place), self._encode
            self._encode = self._encoder.encode
            return [encode(RowBlock(self._reader.reading, rows))] if rows else []
        if place != self._next:
            self.close()
            self._ahead = encode_in_order(self._encoder, self._from(place), self._processes)
        self._next = None  # what fails is not gone on with
        while place not in self._pieces or len(self._ready) < self._pieces[place]:
            piece = next(self._ahead, None)
            if piece is None:  # the stream has no row
                break
            self._ready.append(piece)
        count = self._pieces.pop(place)
        self._next = _after(place, ends=count == 0)
        return [self._ready.popleft() for _ in range(count)]

    def close(self) -> None:
        """End the processes."""
        if isinstance(self._ahead, Generator):
            self._ahead.close()
        self._pieces.clear()
        self._ready.clear()

    def _from(self, place: Place) -> Iterator[RowBlock]:
        """Yield the pieces of a block and of those after it, without an end."""
        while True:
            rows = self._reader.read(place)
            self._pieces[place] = -(-len(rows) // _PIECE_ROWS)
            for start in range(0, len(rows), _PIECE_ROWS):
                yield RowBlock(self._reader.reading, rows[start : start + _PIECE_ROWS])
            if not rows and place[1] == 0:
                return
            place = _after(place, ends=not rows)


def _after(place: Place, ends: bool) -> Place:
    return (place[0] + 1, 0) if ends else (place[0], place[1] + 1)
