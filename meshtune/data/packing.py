"""Packing: documents into packs of bounded length, by best-fit decreasing, in O(n log n), the same every
time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from meshtune.errors import DataError

_WINDOW = 4096
_PACKS_IN_WINDOW = 64


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, order: Sequence[int] | np.ndarray) -> list[list[int]]:
    """Return packs of documents: every document of `order` once, no pack longer than `capacity` tokens.

    Documents are packed inside consecutive windows of the order, so that a pack holds documents that were
    near each other in it: 4,096 of them, or enough for 64 packs. In a window the longest come first, each
    into the fullest pack that still takes it (best-fit decreasing; at most 11/9 of the optimal number of
    packs, Johnson 1973). Packs stand in the order of their first document, and a pack's documents in that
    order, too.

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
    mean = max(1.0, float(sizes.mean())) if len(sizes) else 1.0
    window = max(_WINDOW, int(_PACKS_IN_WINDOW * capacity / mean))
    packs: list[list[int]] = []
    for start in range(0, len(indices), window):
        places = _pack_window(sizes[start : start + window], capacity)
        packs += [[int(indices[start + place]) for place in pack] for pack in places]
    return packs


def _pack_window(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Return packs of places in one window, ordered by first place, each in ascending order."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack number), sorted
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        at = bisect_left(open_packs, (size, -1))
        if at < len(open_packs):
            room, number = open_packs.pop(at)
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(place)
        if room > size:
            insort(open_packs, (room - size, number))
    return sorted(sorted(pack) for pack in packs)


def pack_statistics(packs: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, capacity: int) -> str:
    """Return in one line how many packs there are, how full, and of how many documents."""
    tokens = int(np.asarray(lengths, dtype=np.int64)[[index for members in packs for index in members]].sum())
    documents = [len(members) for members in packs]
    return (
        f"{len(packs):,} packs of up to {capacity:,} tokens, {tokens / (len(packs) * capacity):.2%} full; documents in a pack: "
        f"{sum(documents) / len(packs):.1f} on average, {max(documents):,} at most"
    )
