"""Optimizers that need whole matrices: which parts of the model one rank updates, and who holds what of them.

A `Region` is what is updated at once: a tensor, one matrix of a stack of them (an expert's), or some of its rows. One of the
ranks that hold parts of it is its owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from meshtune.optim.rounding import Box

__all__ = ["Held", "Part", "Region", "Scope", "Share", "share_out"]

Scope = Literal["tensors", "matrices", "blocks"]
"""What is updated at once: whole tensors; of three-dimensional ones each matrix; or rows that are a multiple of
`BLOCK` elements, which is how many share a scale in low-bit states."""

BLOCK = 256
SMALLEST_QUANTISED = 4096


@dataclass(frozen=True)
class Held:
    """What one rank holds of a parameter: the whole's shape, its dtype as text, and the boxes."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Region:
    """`length` rows (of dim 0) from `start` of the tensor `name`; `single`: one matrix of a stack, without its first dim."""

    name: str
    whole: tuple[int, ...]
    start: int
    length: int
    single: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is updated; that of the whole tensor without dimensions is ()."""
        return self.whole[1:] if self.single else (self.length, *self.whole[1:]) if self.whole else ()

    @property
    def is_whole(self) -> bool:
        return not self.whole or (self.length == self.whole[0] and not self.single)


@dataclass(frozen=True)
class Part:
    """A box of a region: where it starts in the region, where in what its holder has, and its shape."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]
    single: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The view of the holder's tensor that the part is, with the dimensions of the region."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor[0] if self.single else tensor

    def within(self, region: Tensor) -> Tensor:
        """The view of the region's tensor that the part is."""
        start, shape = (self.start[1:], self.shape[1:]) if self.single else (self.start, self.shape)
        for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
            region = region.narrow(dim, first, length)
        return region

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Share:
    """A region, its owner, and its parts by the rank that has them; `sources` has each part once."""

    region: Region
    dtype: str
    owner: int
    parts: Mapping[int, tuple[Part, ...]]
    sources: tuple[tuple[int, Part], ...]


def share_out(tables: Sequence[Mapping[str, Held]], scope: Scope) -> list[Share]:
    """Every region of every parameter, and an owner for each, the same list on every rank.

    The largest go first, each to the one of its holders that has least to do so far; what one rank has all of goes to such a
    rank, so that it need not travel there.

    Args:
        tables: of each rank, what it holds by name.
    """
    names = list(dict.fromkeys(name for table in tables for name in table))
    pending = []
    for name in names:
        holders = {rank: table[name] for rank, table in enumerate(tables) if name in table}
        held = next(iter(holders.values()))
        for region in _regions(name, held.shape, [h.boxes for h in holders.values()], scope):
            parts = {rank: _parts(region, h.boxes) for rank, h in holders.items()}
            pending.append((region, held.dtype, {rank: found for rank, found in parts.items() if found}))
    loads = [0] * len(tables)
    shares: dict[int, Share] = {}
    for index in sorted(range(len(pending)), key=lambda i: (-math.prod(pending[i][0].shape), i)):
        region, dtype, parts = pending[index]
        size = math.prod(region.shape)
        complete = [rank for rank, found in parts.items() if sum(part.size for part in found) == size]
        owner = min(complete or parts, key=lambda rank: (loads[rank], rank))
        loads[owner] += size
        shares[index] = Share(region, dtype, owner, parts, _sources(parts, owner))
    return [shares[index] for index in range(len(pending))]


def _regions(name: str, whole: tuple[int, ...], boxes: Sequence[Sequence[Box]], scope: Scope) -> list[Region]:
    if math.prod(whole) == 0:
        return []
    if scope == "matrices" and len(whole) == 3:
        return [Region(name, whole, index, 1, single=True) for index in range(whole[0])]
    everything = [Region(name, whole, 0, whole[0] if whole else 1)]
    if scope != "blocks" or not whole:
        return everything
    rows = sorted({(box.start, box.shape) for own in boxes for box in own})
    stride = math.prod(whole[1:])
    aligned = all(
        shape[1:] == whole[1:]
        and start[0] * stride % BLOCK == shape[0] * stride % BLOCK == 0
        and shape[0] * stride >= SMALLEST_QUANTISED
        for start, shape in rows
    )
    return [Region(name, whole, start[0], shape[0]) for start, shape in rows] if aligned else everything


def _parts(region: Region, boxes: Sequence[Box]) -> tuple[Part, ...]:
    """What of the boxes lies in the region."""
    if not region.whole:
        return tuple(Part((), (), (), False) for _ in boxes)
    found = []
    for box in boxes:
        first = max(box.start[0], region.start)
        last = min(box.start[0] + box.shape[0], region.start + region.length)
        if first < last:
            start = (first - region.start, *box.start[1:])
            local = (box.local[0] + first - box.start[0], *box.local[1:])
            found.append(Part(start, local, (last - first, *box.shape[1:]), region.single))
    return tuple(found)


def _sources(parts: Mapping[int, tuple[Part, ...]], owner: int) -> tuple[tuple[int, Part], ...]:
    """Each box once: the owner's own where it has it, else that of the first rank."""
    found: dict[tuple[int, ...], tuple[int, Part]] = {}
    for rank in sorted(parts, key=lambda rank: (rank != owner, rank)):
        for part in parts[rank]:
            found.setdefault(part.start, (rank, part))
    return tuple(found.values())
