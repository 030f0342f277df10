"""The global order: which rows, or packs of rows, make global batch k of an epoch, for any world size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshtune.data.dataset import TokenDataset
from meshtune.data.packing import pack
from meshtune.errors import DataError

Unit = list[int]


class GlobalOrder:
    """Units (a row, or a pack of rows) in the order in which training meets them.

    Packs are formed once, from the file order or, shuffling, from a permutation by the seed. Shuffling then
    permutes the units of each epoch by (seed, epoch). Global batch k is units k·G to (k+1)·G-1; the last may
    be short.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        packing: bool = False,
        max_seq_length: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Raises DataError if `drop_last` would leave no batch at all, or packing is asked for without a
        capacity.
        """
        self.dataset, self.global_batch_size, self.packing = dataset, global_batch_size, packing
        self._shuffle, self._seed = shuffle, seed
        self._packs = self._form_packs(max_seq_length) if packing else None
        self.units = len(dataset) if self._packs is None else len(self._packs)
        if drop_last and self.units < global_batch_size:
            kind = f"packs (of {len(dataset)} documents)" if packing else "rows"
            raise DataError(
                f"{self.units} {kind} make no full global batch of {global_batch_size}, and drop_last "
                "leaves the short one out: nothing would be trained. Set drop_last: false, "
                "or a smaller global_batch_size"
            )
        whole = self.units - self.units % global_batch_size
        self.units_per_epoch = whole if drop_last else self.units
        self._permuted: tuple[int, NDArray[np.int64]] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch, a short last one included unless it is dropped."""
        return -(-self.units_per_epoch // self.global_batch_size)

    def batch(self, epoch: int, k: int) -> list[Unit]:
        """Return global batch k of an epoch: a list of units, each a list of dataset indices."""
        if not 0 <= k < self.batches_per_epoch:
            raise IndexError(f"batch {k} of {self.batches_per_epoch}")
        return self.window(epoch, k * self.global_batch_size)

    def window(self, epoch: int, start: int) -> list[Unit]:
        """Return the global batch that begins at unit `start` of an epoch; short at the epoch's end."""
        stop = min(start + self.global_batch_size, self.units_per_epoch)
        places = self._order(epoch)[start:stop].tolist()
        return [[place] if self._packs is None else self._packs[place] for place in places]

    def _form_packs(self, capacity: int | None) -> list[Unit]:
        if capacity is None:
            raise DataError("packing needs max_seq_length, the number of tokens that a pack holds")
        count = len(self.dataset)
        order = permutation(count, self._seed, 0) if self._shuffle else np.arange(count)
        return pack(self.dataset.lengths, capacity, order)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._permuted is None or self._permuted[0] != epoch:
            order = permutation(self.units, self._seed, epoch + 1) if self._shuffle else np.arange(self.units)
            self._permuted = epoch, order
        return self._permuted[1]


def permutation(count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count-1 that depends on seed and stream alone, whatever numpy's version.

    Made from raw PCG64 output, whose stream numpy promises to keep; it does not promise that of `permutation`
    (NEP 19).
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64, stream]))
    return np.argsort(bits.random_raw(count), kind="stable")
