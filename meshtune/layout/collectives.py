"""Differentiable collectives, each with its conjugate as its backward.

The names are Megatron's (Shoeybi et al. 2019, figure 3; Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtune.layout.peers import Peers

__all__ = ["all_to_all", "copy_to", "gather_from", "reduce_from", "reduce_scatter_to", "scatter_to", "share_of"]


def copy_to(tensor: Tensor, peers: Peers) -> Tensor:
    """The tensor itself, the same on every rank; its gradient is the sum of the ranks' gradients."""
    return tensor if peers.size == 1 else _CopyTo.apply(tensor, peers)


def reduce_from(tensor: Tensor, peers: Peers) -> Tensor:
    """The sum over ranks; each rank's gradient is that of the sum."""
    return tensor if peers.size == 1 else _ReduceFrom.apply(tensor, peers)


def share_of(tensor: Tensor, peers: Peers) -> Tensor:
    """This rank's share of a tensor that is the same on every rank: a sum over ranks gives it back, and its gradient is that of
    the sum. Nothing is communicated."""
    return tensor if peers.size == 1 else _ShareOf.apply(tensor, peers.size)


def gather_from(tensor: Tensor, dim: int, peers: Peers, partial: bool = True) -> Tensor:
    """The ranks' equal parts, joined along `dim`; a rank's gradient is the sum over ranks of what they give its part.

    With `partial` false, what follows is the same on every rank, and so is its gradient: each takes its own part of it.
    """
    return tensor if peers.size == 1 else _GatherFrom.apply(tensor, dim, peers, partial)


def reduce_scatter_to(tensor: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; gradients are joined. `dim` must be divisible by the ranks."""
    return tensor if peers.size == 1 else _ReduceScatterTo.apply(tensor, dim, peers)


def scatter_to(tensor: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part along `dim` of a tensor that is the same on every rank; gradients are joined."""
    return tensor if peers.size == 1 else _ScatterTo.apply(tensor, dim, peers)


def all_to_all(tensor: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> Tensor:
    """Rows exchanged as `Peers.all_to_all` says; gradients travel back."""
    return tensor if peers.size == 1 else _AllToAll.apply(tensor, tuple(sent), tuple(received), peers)


def _join(parts: Tensor, dim: int) -> Tensor:
    """[size, *shape] to the parts one after another along `dim` of *shape*."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _cut(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The inverse of `_join`."""
    if tensor.shape[dim] % count:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} cannot be cut into {count} equal parts")
    return torch.stack(tensor.chunk(count, dim))


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.peers.all_reduce(gradients[0]), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        return peers.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _ShareOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        return tensor / size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, peers: Peers, partial: bool) -> Tensor:
        ctx.dim, ctx.peers, ctx.partial = dim, peers, partial
        return _join(peers.all_gather(tensor), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = _cut(gradients[0], ctx.dim, ctx.peers.size)
        own = ctx.peers.reduce_scatter(parts) if ctx.partial else parts[ctx.peers.rank].clone()
        return own, None, None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        return peers.reduce_scatter(_cut(tensor, dim, peers.size))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _join(ctx.peers.all_gather(gradients[0]), ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        return _cut(tensor, dim, peers.size)[peers.rank].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _join(ctx.peers.all_gather(gradients[0]), ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: tuple[int, ...], received: tuple[int, ...], peers: Peers) -> Tensor:
        ctx.sent, ctx.received, ctx.peers = sent, received, peers
        return peers.all_to_all(tensor, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.peers.all_to_all(gradients[0], ctx.received, ctx.sent), None, None, None
