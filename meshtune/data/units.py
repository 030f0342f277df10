"""Units: what a batch is counted in (a row, a pack, a sequence of a token file), and which one stands where in an epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshtune.data.collate import Document
from meshtune.data.packing import DEFAULT_PACKING, PackingOptions, pack, pack_statistics
from meshtune.errors import DataError


@dataclass(frozen=True)
class UnitOptions:
    """How units are formed of documents, and in which order an epoch has them: shuffled by the seed or as they stand, packed up
    to `max_seq_length` tokens or not.
    """

    shuffle: bool = True
    seed: int = 42
    packing: bool = False
    max_seq_length: int | None = None
    packing_options: PackingOptions = DEFAULT_PACKING

    def with_seed(self, seed: int) -> UnitOptions:
        """The same with another seed."""
        return replace(self, seed=seed)


Unit = list[int]
"""A unit by the numbers that its kind knows it by; a row or a pack of rows: its documents' indices."""


class Units(Protocol):
    """The units of one data set in the order of each epoch: a function of data, settings, seed and epoch alone."""

    @property
    def kind(self) -> str:
        """What the units are called in a message: `rows`, `packs (of 12 documents)`."""
        ...

    def __len__(self) -> int:
        """Return the number of units in every epoch."""
        ...

    def between(self, epoch: int, start: int, stop: int) -> list[Unit]:
        """Return the units at places `start` to `stop - 1` of an epoch."""
        ...

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit. Raises DataError where a token file holds what the model has no embedding for."""
        ...

    def names(self, unit: Unit) -> list[int | str]:
        """Return how a user finds what is in a unit: rows by their numbers in the prepared data, what else there is in words."""
        ...

    def notes(self) -> list[str]:
        """Return what a user should know of how the units were formed, as lines."""
        ...


class Corpus(Protocol):
    """Data that is tokens: it says what its units are."""

    def units(self, options: UnitOptions) -> Units:
        """Return the units in the order of each epoch. Raises DataError where the options cannot be had."""
        ...


class Documents(Protocol):
    """Tokenised documents by index, with `lengths` [D] int64 in tokens."""

    lengths: NDArray[np.int64]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


class RowUnits:
    """Rows, or packs of rows that are formed once, from the file order or, shuffling, from a permutation by the seed. Shuffling
    then permutes the units of each epoch by (seed, epoch).
    """

    def __init__(self, dataset: Documents, options: UnitOptions) -> None:
        """Raises DataError if packing is asked for without a capacity, or a document is longer than it."""
        self._dataset, self._shuffle, self._seed = dataset, options.shuffle, options.seed
        self._capacity = options.max_seq_length or 0
        self._packs = self._form_packs(options) if options.packing else None
        self._permuted: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._dataset) if self._packs is None else len(self._packs)

    @property
    def kind(self) -> str:
        """What the units are called in a message."""
        return "rows" if self._packs is None else f"packs (of {len(self._dataset)} documents)"

    def between(self, epoch: int, start: int, stop: int) -> list[Unit]:
        """Return units, each a list of document indices."""
        places = self._order(epoch)[start:stop].tolist()
        return [[place] if self._packs is None else self._packs[place] for place in places]

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit."""
        return [self._dataset[index] for index in unit]

    def names(self, unit: Unit) -> list[int | str]:
        """Return the numbers of the rows in the prepared data."""
        return list(unit)

    def notes(self) -> list[str]:
        """Return how full the packs are; nothing of rows."""
        return [] if self._packs is None else [pack_statistics(self._packs, self._dataset.lengths, self._capacity)]

    def _form_packs(self, options: UnitOptions) -> list[Unit]:
        if options.max_seq_length is None:
            raise DataError("packing needs max_seq_length, the number of tokens that a pack holds")
        count = len(self._dataset)
        order = permutation(count, self._seed, 0) if self._shuffle else np.arange(count)
        return pack(self._dataset.lengths, options.max_seq_length, order, options.packing_options)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._permuted is None or self._permuted[0] != epoch:
            order = permutation(len(self), self._seed, epoch + 1) if self._shuffle else np.arange(len(self))
            self._permuted = epoch, order
        return self._permuted[1]


def permutation(count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count-1 that depends on seed and stream alone, whatever numpy's version.

    Made from raw PCG64 output, whose stream numpy promises to keep; it does not promise that of `permutation`
    (NEP 19).
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64, stream]))
    return np.argsort(bits.random_raw(count), kind="stable")
