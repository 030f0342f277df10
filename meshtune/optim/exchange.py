"""Flat messages between the ranks of a world: one to each other rank, of sizes that both ends know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["any_rank", "exchange", "tables", "this_rank"]

T = TypeVar("T")


def this_rank() -> int:
    """This rank in the world; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def tables(own: T) -> list[T]:
    """What every rank gives, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[T] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Of each flag whether it is set on any rank."""
    if not flags or not dist.is_initialized() or dist.get_world_size() == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return [bool(flag) for flag in shared.tolist()]


def exchange(sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, int], like: Tensor) -> dict[int, Tensor]:
    """Send tensors to ranks, as one flat message each, and receive those of others.

    Args:
        sent: by rank, tensors of one dtype.
        received: by rank, how many elements come from it. Every rank must call this, and the two must fit together.
        like: of the dtype and device of all messages.
    """
    messages = {rank: torch.cat([tensor.reshape(-1) for tensor in tensors]) for rank, tensors in sent.items()}
    arrived = {rank: like.new_empty(size) for rank, size in received.items()}
    operations = [dist.P2POp(dist.isend, message, rank) for rank, message in messages.items()]
    operations += [dist.P2POp(dist.irecv, message, rank) for rank, message in arrived.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return arrived
