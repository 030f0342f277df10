"""Which queries of one rank meet which keys of another, in pieces small enough to be computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtune.layout import zigzag
from meshtune.models.scores import blocks

QUERIES, KEYS = 256, 1024


@dataclass(frozen=True)
class Tile:
    """Slices of what the two ranks hold; `allowed` [queries, keys] is true where a query may see a key, None if everywhere."""

    queries: slice
    keys: slice
    allowed: Tensor | None


def tiles(
    documents: Sequence[range],
    size: int,
    rank: int,
    owner: int,
    chunk: int,
    window: int | None,
    device: torch.device,
) -> Iterator[Tile]:
    """Of queries that `rank` holds and keys that `owner` holds, in chunks of `chunk` tokens, where attention is causal, stays in
    its document and, with a `window`, sees so many positions."""
    for own_place, own in enumerate(zigzag.own_chunks(size, rank)):
        for place, other in enumerate(zigzag.own_chunks(size, owner)):
            if other > own:
                continue
            shifts = own_place * chunk - own * chunk, place * chunk - other * chunk
            for queries, keys in _meetings(documents, _span(own, chunk), _span(other, chunk), window):
                allowed = _allowed(queries, keys, window, device)
                yield Tile(_shifted(queries, shifts[0]), _shifted(keys, shifts[1]), allowed)


def _span(chunk: int, length: int) -> range:
    return range(chunk * length, (chunk + 1) * length)


def _meetings(
    documents: Sequence[range], own: range, other: range, window: int | None
) -> Iterator[tuple[range, range]]:
    """Blocks of queries and keys, as places in the whole row."""
    for document in documents:
        queries, keys = _common(document, own), _common(document, other)
        for block in blocks(queries, QUERIES) if keys else ():
            first = keys.start if window is None else max(keys.start, block.start - window + 1)
            for seen in blocks(range(first, min(keys.stop, block.stop)), KEYS):
                yield block, seen


def _allowed(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor | None:
    nearest, farthest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
    if nearest >= 0 and (window is None or farthest < window):
        return None
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _shifted(places: range, by: int) -> slice:
    return slice(places.start + by, places.stop + by)
