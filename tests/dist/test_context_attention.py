"""Attention over context-parallel ranks that are processes: what one process computes, and no more exchanged than it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.layout import zigzag
from meshtune.layout.peers import RankPeers
from meshtune.models.attention import document_attention
from meshtune.models.documents import ContextParallel, documents
from tests.ranks import Ranks

LENGTHS = [13, 1, 20, 1, 1, 8, 4]
TOKENS, HEADS, KV_HEADS, WIDTH = sum(LENGTHS), 6, 2, 8


class _Counted(RankPeers):
    """Peers that note each collective and the bytes of one rank's part in it."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.calls.append(("all_gather", tensor.nbytes))
        return super().all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self.calls.append(("reduce_scatter", tensor.nbytes // self.size))
        return super().reduce_scatter(tensor)

    def all_to_all(self, tensor: Tensor, sent: Any, received: Any) -> Tensor:
        self.calls.append(("all_to_all", tensor.nbytes))
        return super().all_to_all(tensor, sent, received)


def _attend(window: int | None, context: ContextParallel | None, tokens: Tensor) -> list[Tensor]:
    """Output, and the gradients of q, k and v, of these tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    qkv = [torch.randn(shape, generator=generator)[:, :, tokens].requires_grad_() for shape in shapes]
    weights = torch.randn(1, TOKENS, HEADS, WIDTH, generator=generator)[:, tokens]
    with documents(LENGTHS, context):
        output = document_attention(nn.Module(), *qkv, None, sliding_window=window)[0]
    gradients = torch.autograd.grad((output * weights).sum(), qkv)
    return [output.detach().transpose(1, 2), *gradients]


def over_ranks(method: str, window: int | None) -> tuple[list[Tensor], list[tuple[str, int]]]:
    peers = _Counted()
    tokens = zigzag.own_tokens(TOKENS, peers.size, peers.rank)
    return _attend(window, ContextParallel(peers, method), tokens), peers.calls


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", ["allgather", "ulysses", "ring"])
def test_processes_get_what_one_gets(ranks: Ranks, method: str, size: int, window: int | None) -> None:
    parts, calls = zip(*ranks.call(size, over_ranks, method, window), strict=True)
    wanted = _attend(window, None, torch.arange(TOKENS))
    for found, whole in zip(zip(*parts, strict=True), wanted, strict=True):
        joined = zigzag.in_sequence(torch.cat(found, 2), 2, size)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)
    assert list(calls) == [_calls(method, size)] * size


def _calls(method: str, size: int) -> list[tuple[str, int]]:
    """Of one layer's forward and backward: keys and values are 2 x KV_HEADS heads of T / size tokens."""
    a_head = TOKENS // size * WIDTH * 4
    both = 2 * KV_HEADS * a_head
    if method == "allgather":
        return [("all_gather", both), ("reduce_scatter", both)]
    if method == "ring":
        return [("all_to_all", both)] * (size - 1 + 2 * size - 1)
    copied = HEADS if KV_HEADS % size else KV_HEADS
    there, back = ("all_to_all", (HEADS + 2 * copied) * a_head), ("all_to_all", HEADS * a_head)
    return [there, back, back, there]
