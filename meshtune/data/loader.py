"""Each rank's share of the global order, in micro-batches, and the cursor from which a run goes on."""

from __future__ import annotations

from collections.abc import Iterator

from meshtune.data.batch import Batch
from meshtune.data.collate import as_filler, collate_packed, collate_padded
from meshtune.data.order import Cursor, GlobalOrder, Order, Unit

__all__ = ["Cursor", "Loader", "Share", "validation_batches"]


class Share:
    """What one of `world_size` readers gets of a global batch; `rank` and `world_size` are of the batch view.

    Micro-batch m of rank r is units m·W·b + r·b and the b-1 after it. Every rank gets the same number of
    micro-batches; one that has no units left gets the batch's first unit with nothing supervised and nothing
    counted.
    """

    def __init__(
        self, order: Order, *, rank: int, world_size: int, per_device_batch_size: int, pad_token_id: int
    ) -> None:
        self._order, self._rank, self._world_size = order, rank, world_size
        self._size, self._pad_token_id = per_device_batch_size, pad_token_id

    def micro_batches(self, units: list[Unit]) -> list[Batch]:
        """Return this rank's micro-batches of a global batch given as units."""
        stride = self._world_size * self._size
        starts = range(self._rank * self._size, self._rank * self._size + len(units), stride)
        count = -(-len(units) // stride)
        mine = [units[start : start + self._size] for start in list(starts)[:count]]
        return [self._collate(part) if part else as_filler(self._collate(units[:1])) for part in mine]

    def _collate(self, units: list[Unit]) -> Batch:
        documents = [document for unit in units for document in self._order.documents(unit)]
        return collate_packed(documents) if self._order.packing else collate_padded(documents, self._pad_token_id)


class Loader:
    """Hands out this rank's micro-batches, global batch after global batch, epoch after epoch, without an
    end.

    Its state is a cursor into the global order, the same on every rank and for every world size, micro-batch
    and global batch size.
    """

    def __init__(
        self, order: Order, *, rank: int, world_size: int, per_device_batch_size: int, pad_token_id: int
    ) -> None:
        self._order = order
        self._share = Share(
            order,
            rank=rank,
            world_size=world_size,
            per_device_batch_size=per_device_batch_size,
            pad_token_id=pad_token_id,
        )
        self._cursor: Cursor = {"epoch": 0, "units": 0}
        self.taken: list[list[int | str]] = []
        """What is in each unit of the last global batch, of all ranks; see `Units.names`."""

    def next(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch; as many as every other rank gets."""
        units, following = self._order.take(self._cursor)
        self.taken = [self._order.names(unit) for unit in units]
        batches = self._share.micro_batches(units)
        self._cursor = following
        return batches

    @property
    def epoch_progress(self) -> float:
        """Epochs consumed so far: 1.5 is half-way through the second."""
        return self._order.progress(self._cursor)

    def state_dict(self) -> Cursor:
        """Return the cursor; after an epoch's last batch it is the start of the next epoch."""
        return self._cursor.copy()

    def load_state_dict(self, state: Cursor) -> None:
        """Go on from a cursor. Raises DataError for one that cannot be a place in this order."""
        self._cursor = self._order.checked(state)


def validation_batches(
    order: GlobalOrder, *, rank: int, world_size: int, per_device_batch_size: int, pad_token_id: int
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each global batch, once over the data; equally many on every rank.

    Token-weighted sums over them do not depend on batch or world size: every unit counts once, fillers count
    nothing.
    """
    share = Share(
        order,
        rank=rank,
        world_size=world_size,
        per_device_batch_size=per_device_batch_size,
        pad_token_id=pad_token_id,
    )
    for k in range(order.batches_per_epoch):
        yield share.micro_batches(order.batch(0, k))
