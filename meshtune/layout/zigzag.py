"""Which tokens of a sequence each context-parallel rank holds: an early chunk and a late one.

The sequence is cut into 2 x size chunks, and rank r holds chunks r and 2 x size - 1 - r, in this order. Under causal attention
a late chunk has many keys to see and an early one few, so every rank has the same work.
"""

from __future__ import annotations

import torch
from torch import Tensor


def own_chunks(size: int, rank: int) -> tuple[int, int]:
    """The chunks of a rank, in the order in which it holds them."""
    return rank, 2 * size - 1 - rank


def own_tokens(length: int, size: int, rank: int) -> Tensor:
    """[length / size] int64: places in the sequence of a rank's tokens. `length` is a multiple of 2 x size."""
    if length % (2 * size):
        raise ValueError(f"{length} tokens cannot be cut into {2 * size} equal chunks")
    chunks = torch.arange(length).view(2 * size, -1)
    return chunks[list(own_chunks(size, rank))].flatten()


def in_sequence(joined: Tensor, dim: int, size: int) -> Tensor:
    """From all ranks' tokens, joined in rank order along `dim`, to the order of the sequence."""
    return _reordered(joined, dim, [_places(size).index(chunk) for chunk in range(2 * size)])


def by_rank(whole: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of `in_sequence`: each rank's tokens together, in rank order."""
    return _reordered(whole, dim, _places(size))


def _places(size: int) -> list[int]:
    return [chunk for rank in range(size) for chunk in own_chunks(size, rank)]


def _reordered(tensor: Tensor, dim: int, order: list[int]) -> Tensor:
    chunks = tensor.chunk(len(order), dim)
    return torch.cat([chunks[index] for index in order], dim)
