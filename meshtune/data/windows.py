"""Sequences cut out of token files: every token is predicted once in an epoch, but for the first of each document."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshtune.data.collate import Document, Window
from meshtune.data.units import Unit, UnitOptions, permutation
from meshtune.errors import DataError


class Readable(Protocol):
    """Documents of which parts can be read; `lengths` [D] int64 in tokens."""

    lengths: NDArray[np.int64]

    def __len__(self) -> int: ...

    def read(self, document: int, start: int, count: int) -> NDArray[np.int64]: ...


class WindowUnits:
    """Units are sequences of `max_seq_length` positions, each with its target: the token after it in the same document.

    Packing lays all documents one behind the other, in a new order by (seed, epoch) when shuffling, and cuts that line into
    sequences: all are full but the last, and in each the parts of different documents are kept apart. Without packing a
    sequence is a window of one document. Shuffling permutes the sequences of each epoch, too. A unit is [epoch, number].

    Nothing is held but the order of documents and sequences: 40 bytes for each document, 8 for each sequence.
    """

    def __init__(self, corpus: Readable, options: UnitOptions, max_seq_length: int) -> None:
        """Raises DataError where no document has a token to predict."""
        self._corpus, self._shuffle, self._seed = corpus, options.shuffle, options.seed
        self._packing, self._longest = options.packing, max_seq_length
        self._positions = np.maximum(corpus.lengths - 1, 0)
        if not self._positions.any():
            raise DataError("no document has two tokens, of which one is predicted")
        if options.packing:
            self._count = -(-int(self._positions.sum()) // max_seq_length)
        else:
            self._window_ends = np.cumsum(-(-self._positions // max_seq_length))
            self._count = int(self._window_ends[-1])
        self._places: tuple[int, NDArray[np.int64]] | None = None
        self._lines: dict[int, tuple[NDArray[np.int64] | None, NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def kind(self) -> str:
        """What the units are called in a message."""
        return f"sequences (of {len(self._corpus):,} documents)"

    def between(self, epoch: int, start: int, stop: int) -> list[Unit]:
        """Return units [epoch, number of the sequence]."""
        if not self._shuffle:
            return [[epoch, place] for place in range(start, min(stop, self._count))]
        if self._places is None or self._places[0] != epoch:
            self._places = epoch, permutation(self._count, self._seed, 2 * epoch)
        return [[epoch, place] for place in self._places[1][start:stop].tolist()]

    def documents(self, unit: Unit) -> list[Document]:
        """Return the windows of a sequence, each [T] with T or more tokens behind it in its document."""
        epoch, number = unit
        if self._packing:
            return self._of_line(epoch, number)
        document = int(np.searchsorted(self._window_ends, number, side="right"))
        before = int(self._window_ends[document - 1]) if document else 0
        return [self._window(document, (number - before) * self._longest, self._longest)]

    def names(self, unit: Unit) -> list[int | str]:
        """Return which sequence of which epoch it is."""
        return [f"sequence {unit[1]} of epoch {unit[0]}"]

    def notes(self) -> list[str]:
        """Return how many sequences an epoch has."""
        return [f"{self._count:,} sequences of up to {self._longest:,} tokens in an epoch"]

    def _of_line(self, epoch: int, number: int) -> list[Document]:
        order, ends = self._line(epoch)
        at, stop = number * self._longest, min((number + 1) * self._longest, int(ends[-1]))
        place = int(np.searchsorted(ends, at, side="right"))
        found: list[Document] = []
        while at < stop:
            document = place if order is None else int(order[place])
            offset = int(self._positions[document]) - (int(ends[place]) - at)
            if ends[place] > at:
                found.append(self._window(document, offset, min(stop, int(ends[place])) - at))
                at = min(stop, int(ends[place]))
            place += 1
        return found

    def _line(self, epoch: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """The documents of an epoch in their order (None: of the files), and where each ends on the line of positions. The last
        two epochs are kept, as reading may be ahead of training."""
        if not self._shuffle:
            epoch = 0
        if epoch not in self._lines:
            order = permutation(len(self._corpus), self._seed, 2 * epoch + 1) if self._shuffle else None
            ends = np.cumsum(self._positions if order is None else self._positions[order])
            self._lines = {**{e: line for e, line in self._lines.items() if e == epoch - 1}, epoch: (order, ends)}
        return self._lines[epoch]

    def _window(self, document: int, start: int, longest: int) -> Window:
        count = min(longest, int(self._positions[document]) - start)
        ids = self._corpus.read(document, start, count + 1)
        return Window(ids[:-1], np.ones(count, dtype=bool), int(ids[-1]))
