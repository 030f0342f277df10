"""The chunked loss on weights that FSDP2 gathered or DDP copied: the gradients of one process (C37, C22)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshtune.losses import linear_cross_entropy
from tests.ranks import Ranks

VOCABULARY, HIDDEN = 13, 6


class TinyModel(nn.Module):
    """An embedding, one layer and a head, tied or not; the forward ends before the head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embedding(ids)).tanh()


def loss_sum(model: nn.Module, tiny: TinyModel, rows: Tensor, count: int) -> Tensor:
    """Over the first `count` rows; the rest carries no loss."""
    hidden = model(rows)[:count]
    return linear_cross_entropy(hidden, (rows[:count] * 5) % VOCABULARY, tiny.head, [tiny.head.weight], 3)


def gradients(tiny: TinyModel) -> list[Tensor]:
    grads = [p.grad for p in tiny.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def rows_of(rank: int) -> Tensor:
    return torch.arange(9) + 4 * rank


def one_process(tied: bool, counts: dict[int, int]) -> list[Tensor]:
    tiny = TinyModel(tied)
    losses = [loss_sum(tiny, tiny, rows_of(rank) % VOCABULARY, count) for rank, count in counts.items()]
    (2 * sum(losses) / sum(counts.values())).backward()
    return gradients(tiny)


def two_ranks(strategy: str, tied: bool, counts: dict[int, int]) -> list[Tensor]:
    """Two micro-batches, to see that gathering and reducing repeat."""
    tiny = TinyModel(tied)
    if strategy == "ddp":
        model: nn.Module = DistributedDataParallel(tiny)
    else:
        fully_shard(tiny.layer)
        model = fully_shard(tiny)
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        loss = loss_sum(model, tiny, rows_of(rank) % VOCABULARY, counts[rank])
        (loss * world / sum(counts.values())).backward()
    return gradients(tiny)


@pytest.mark.parametrize("counts", [{0: 2, 1: 8}, {0: 5, 1: 0}], ids=["unequal", "none-on-one-rank"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(
    ranks: Ranks, strategy: str, tied: bool, counts: dict[int, int]
) -> None:
    expected = one_process(tied, counts)
    for found in ranks.call(2, two_ranks, strategy, tied, counts):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
