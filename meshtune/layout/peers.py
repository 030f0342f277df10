"""Peers: the ranks along one axis or view, and what they can do together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Peers(Protocol):
    """Collectives over plain contiguous tensors, which have the same shape on every rank unless said otherwise.

    Each rank calls the same methods in the same order. Nothing here is differentiable: see `layout.collectives`.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int:
        """This rank's place, in `range(size)`."""

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """A new tensor: the `sum` or `max` over ranks, the same bits on each."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape]: the tensor of every rank, in rank order."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """[size, *shape] to [*shape]: the sum over ranks of `tensor[rank]`."""

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows of dim 0: `sent[r]` of them, in rank order, go to rank r; `received[r]` come from it. [sum(received), ...]."""


class RankPeers:
    """The peers of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(total, _OPERATIONS[operation], group=self.group)
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        if self.size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.size * tensor.numel())  # flat: backends differ in the shapes that they take
        dist.all_gather_into_tensor(gathered, tensor.flatten(), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        if self.size == 1:
            return tensor[0]
        own = tensor.new_empty(tensor.shape[1:])  # no view: models may write into it
        dist.reduce_scatter_tensor(own.view(-1), tensor.flatten(), group=self.group)
        return own

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        tensor = tensor.detach().contiguous()
        if self.size == 1:
            return tensor
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(result, tensor, list(received), list(sent), group=self.group)
        return result
