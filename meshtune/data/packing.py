"""Packing: documents into packs of bounded length, by best-fit decreasing, in O(n log n), the same every
time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from meshtune.errors import DataError

_WINDOW = 4096
_PACKS_IN_WINDOW = 64


@dataclass(frozen=True)
class PackingOptions:
    """Over how many documents of the order a pack may reach (None: 4,096, or enough for 64 packs), and how many documents a pack
    may hold (None: as many as fit).
    """

    window: int | Literal["all"] | None = None
    max_documents: int | None = None


DEFAULT_PACKING = PackingOptions()


def pack(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    order: Sequence[int] | np.ndarray,
    options: PackingOptions = DEFAULT_PACKING,
) -> list[list[int]]:
    """Return packs of documents: every document of `order` once, no pack longer than `capacity` tokens.

    Documents are packed inside consecutive windows of the order, so that a pack holds documents that were
    near each other in it. In a window the longest come first, each into the fullest pack that still takes it
    (best-fit decreasing; at most 11/9 of the optimal number of packs, Johnson 1973). Packs stand in the order
    of their first document, and a pack's documents in that order, too.

    Args:
        lengths: tokens of each document, by document index.
        capacity: the most tokens that a pack may hold.
        order: document indices, in the order wanted.

    Raises DataError for a document longer than `capacity`: such rows are cut or dropped before.
    """
    indices = np.asarray(order, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[indices]
    if len(sizes) and sizes.max() > capacity:
        worst = int(sizes.argmax())
        raise DataError(f"document {indices[worst]} has {sizes[worst]} tokens; a pack holds at most {capacity}")
    window = _window(sizes, capacity, options)
    packs: list[list[int]] = []
    for start in range(0, len(indices), window):
        places = _pack_window(sizes[start : start + window], capacity, options.max_documents or window)
        packs += [[int(indices[start + place]) for place in pack] for pack in places]
    return packs


def _window(sizes: np.ndarray, capacity: int, options: PackingOptions) -> int:
    if options.window == "all":
        return max(1, len(sizes))
    if options.window is not None:
        return options.window
    mean = max(1.0, float(sizes.mean())) if len(sizes) else 1.0
    return max(_WINDOW, int(_PACKS_IN_WINDOW * capacity / mean))


def _pack_window(sizes: np.ndarray, capacity: int, max_documents: int) -> list[list[int]]:
    """Return packs of places in one window, ordered by first place, each in ascending order.

    Open packs are kept by the room left in them: there are at most `capacity` rooms, however many packs.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # sorted
    open_packs: dict[int, list[int]] = {}  # room to the numbers of packs that have it, a heap
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            number = heappop(open_packs[room])
            if not open_packs[room]:
                del open_packs[room], rooms[at]
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(place)
        left = room - size
        if left and len(packs[number]) < max_documents:
            if left not in open_packs:
                insort(rooms, left)
            heappush(open_packs.setdefault(left, []), number)
    return sorted(sorted(pack) for pack in packs)


def pack_statistics(packs: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, capacity: int) -> str:
    """Return in one line how many packs there are, how full, and of how many documents."""
    tokens = int(np.asarray(lengths, dtype=np.int64)[[index for members in packs for index in members]].sum())
    documents = [len(members) for members in packs]
    return (
        f"{len(packs):,} packs of up to {capacity:,} tokens, {tokens / (len(packs) * capacity):.2%} full; documents in a pack: "
        f"{sum(documents) / len(packs):.1f} on average, {max(documents):,} at most"
    )
