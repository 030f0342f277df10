"""A model whose sequences are cut over context-parallel ranks learns what it learns from whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshtune.data.batch import Batch
from meshtune.data.collate import collate_packed, collate_padded
from meshtune.layout import AXES, Layout
from meshtune.layout.simulated import simulate
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.causal_lm import CausalLM
from meshtune.models.documents import ContextParallel
from meshtune.models.whole_sequences import give_whole_sequences
from meshtune.parallel.context import cut
from meshtune.recipes.objectives import next_token
from tests.unit.models_tiny import tiny_model

METHODS = ["allgather", "ulysses", "ring"]


def _documents(*lengths: int) -> list:
    rng = np.random.default_rng(0)
    return [(rng.integers(4, 90, length), rng.random(length) < 0.7) for length in lengths]


def _learn(model: CausalLM, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Summed loss and the gradients of all parameters."""
    with model.documents(batch):
        loss_sum = next_token(model, batch)[0]
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
    return loss_sum.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _over_ranks(
    name: str, batch: Batch, size: int, method: str, whole: tuple[str, ...] = ()
) -> tuple[Tensor, list[Tensor]]:
    model = tiny_model(name, DOCUMENT_ATTENTION).train()
    give_whole_sequences(model, whole)

    def work(rank: Layout) -> Any:
        peers = rank.peers("cp")
        return _learn(CausalLM(model, ContextParallel(peers, method)), cut(batch, peers))

    losses, gradients = zip(*simulate(Layout({axis: size if axis == "cp" else 1 for axis in AXES}), work), strict=True)
    return sum(losses), [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]


def _assert_same(name: str, batch: Batch, size: int, method: str, whole: tuple[str, ...] = ()) -> None:
    wanted, gradients = _learn(CausalLM(tiny_model(name, DOCUMENT_ATTENTION).train()), batch)
    found, parts = _over_ranks(name, batch, size, method, whole)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    largest = max(gradient.abs().max().item() for gradient in gradients)
    for a, b in zip(parts, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(8,), (3, 5)], ids=["one document", "two documents"])
def test_loss_is_that_of_one_rank(lengths: tuple[int, ...], method: str) -> None:
    """C54."""
    _assert_same("llama", collate_packed(_documents(*lengths)), 2, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["qwen2-window", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "opt", "qwen3_moe"]
)
@pytest.mark.parametrize("collate", [collate_packed, lambda rows: collate_padded(rows, 0)], ids=["packed", "padded"])
def test_every_gradient_is_that_of_one_rank(collate: Any, name: str, method: str) -> None:
    """Unequal lengths, of which none fits the chunks; not every rank supervises as many tokens."""
    _assert_same(name, collate(_documents(11, 1, 17, 6)), 2, method)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "whole"),
    [("mamba", ("MambaMixer",)), ("llama", ("LlamaAttention", "LlamaMLP"))],
    ids=lambda value: str(value),
)
def test_layers_that_are_given_whole_sequences_keep_their_gradients(
    name: str, whole: tuple[str, ...], size: int
) -> None:
    """A recurrence; attention, which then has nothing to exchange. Padding is on some ranks only."""
    _assert_same(name, collate_padded(_documents(11, 1, 17, 6), 0), size, "ring", whole)


@pytest.mark.parametrize("method", ["allgather", "ring"])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_two(size: int, method: str) -> None:
    _assert_same("llama-odd", collate_packed(_documents(11, 1, 17, 6)), size, method)


def test_a_rank_with_nothing_supervised_takes_part() -> None:
    ids = np.arange(4, 28)
    batch = collate_packed([(ids, np.arange(24) < 6)])
    assert [cut(batch, place).supervised_tokens for place in _places(2)] == [5, 0]
    _assert_same("gemma2", batch, 2, "ring")


def _places(size: int) -> list[Any]:
    class Place:
        def __init__(self, rank: int):
            self.size, self.rank = size, rank

    return [Place(rank) for rank in range(size)]
