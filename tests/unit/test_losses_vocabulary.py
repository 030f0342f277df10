"""A loss over a vocabulary whose rows lie on several ranks: the numbers of one rank, and no logit travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtune.layout import AXES, Layout
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import Cut
from meshtune.layout.simulated import simulate
from meshtune.losses import VocabularyPart, linear_cross_entropy, token_scores

HIDDEN, ROWS = 8, 23
HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda logits: logits,
    "scaled": lambda logits: logits * 0.0625,
    "soft-capped": lambda logits: 3.0 * torch.tanh(logits / 3.0),
}


@dataclass
class CountingPeers:
    """Counts what travels, in numbers that a rank gives."""

    inner: Peers
    sent: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def rank(self) -> int:
        return self.inner.rank

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        self.sent.append(tensor.numel())
        return self.inner.all_reduce(tensor, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor.numel())
        return self.inner.all_gather(tensor)


def make(vocabulary: int, rows: int) -> tuple[Tensor, Tensor, nn.Linear]:
    draw = torch.Generator().manual_seed(3)
    head = nn.Linear(HIDDEN, vocabulary)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    hidden = torch.randn(rows, HIDDEN, generator=draw)
    return hidden, torch.randint(0, vocabulary, (rows,), generator=draw), head


def whole(hidden: Tensor, targets: Tensor, head: nn.Linear, finish: Callable[[Tensor], Tensor]) -> list[Tensor]:
    hidden = hidden.clone().requires_grad_()
    loss = F.cross_entropy(finish(head(hidden)), targets, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss * 0.37, [hidden, head.weight, head.bias])]


def over_ranks(
    size: int,
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear,
    finish: Callable[[Tensor], Tensor],
    chunk_size: int | None = None,
) -> list[tuple[list[Tensor], list[int]]]:
    """What each rank has: loss, gradients of hidden states, of its rows of the weight, of its biases; and what it sent."""

    def work(layout: Layout) -> tuple[list[Tensor], list[int]]:
        peers = CountingPeers(layout.peers("tp"))
        piece = Cut("tp", 0, (head.out_features,)).piece(tuple(head.weight.shape), size, peers.rank)
        own = nn.Linear(HIDDEN, piece.local_shape[0])
        own.weight = nn.Parameter(piece.of(head.weight.detach()))
        own.bias = nn.Parameter(head.bias.detach().narrow(0, *piece.spans[0]).clone())
        inputs = hidden.clone().requires_grad_()
        part = VocabularyPart(piece.spans[0][0], head.out_features, peers)
        leaves = [inputs, own.weight, own.bias]
        loss = linear_cross_entropy(inputs, targets, lambda h: finish(own(h)), leaves[1:], chunk_size, part)
        return [loss.detach(), *torch.autograd.grad(loss * 0.37, leaves)], peers.sent

    return simulate(Layout({axis: size if axis == "tp" else 1 for axis in AXES}), work)


def assert_same(found: Sequence[list[Tensor]], wanted: list[Tensor]) -> None:
    """Loss and gradient of hidden states on every rank, those of the head put together."""
    for loss, hidden, *_ in found:
        torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(hidden, wanted[1], rtol=1e-5, atol=1e-6)
    for index in (2, 3):
        together = torch.cat([rank[index] for rank in found])
        torch.testing.assert_close(together, wanted[index], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("vocabulary", "size"), [(36, 2), (37, 2), (37, 4), (5, 4)], ids=["even", "uneven", "uneven-4", "a-rank-without"]
)
def test_value_and_gradients_are_those_of_one_rank(
    vocabulary: int, size: int, name: str, chunk_size: int | None
) -> None:
    """Of five words among four ranks, the last has none, and its logits are not the largest of anything."""
    hidden, targets, head = make(vocabulary, ROWS)
    ranks = over_ranks(size, hidden, targets, head, HEADS[name], chunk_size)
    assert_same([found for found, _ in ranks], whole(hidden, targets, head, HEADS[name]))


def test_logits_of_any_size_do_not_overflow() -> None:
    """The largest logit is that of all ranks; 1e4 would be inf in an exponential."""
    hidden, targets, head = make(37, ROWS)
    ranks = over_ranks(3, hidden, targets, head, lambda logits: logits * 1e4)
    wanted = whole(hidden, targets, head, lambda logits: logits * 1e4)
    assert torch.isfinite(wanted[0])
    torch.testing.assert_close(ranks[0][0][0], wanted[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [2, 3])
def test_no_supervised_row_gives_exact_zeros_on_every_rank(size: int) -> None:
    """C22."""
    hidden, targets, head = make(37, 0)
    for (loss, *gradients), _ in over_ranks(size, hidden, targets, head, HEADS["plain"]):
        assert loss.item() == 0.0 and all(torch.count_nonzero(gradient) == 0 for gradient in gradients)


@pytest.mark.parametrize("vocabulary", [37, 3700])
def test_three_numbers_a_row_travel_and_the_gradient_of_hidden_states(vocabulary: int) -> None:
    """However large the vocabulary is: logits are never gathered."""
    hidden, targets, head = make(vocabulary, ROWS)
    for _, sent in over_ranks(2, hidden, targets, head, HEADS["plain"]):
        assert sum(sent) <= 3 * ROWS + ROWS * HIDDEN


def test_ranks_agree_bit_for_bit_on_the_loss() -> None:
    hidden, targets, head = make(37, ROWS)
    first, *others = [found for found, _ in over_ranks(4, hidden, targets, head, HEADS["soft-capped"])]
    assert all(torch.equal(first[0], other[0]) and torch.equal(first[1], other[1]) for other in others)


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize(("vocabulary", "size"), [(37, 1), (36, 2), (37, 4), (5, 4)])
def test_scores_are_those_of_all_logits(vocabulary: int, size: int, chunk_size: int | None) -> None:
    """Two words, on other ranks if there are several, have equal logits: the first of them is the likeliest, as by argmax."""
    hidden, targets, head = make(vocabulary, ROWS)
    with torch.no_grad():
        head.weight[-1], head.bias[-1] = head.weight[0], head.bias[0]
        logits = head(hidden)
        targets[::2] = logits.argmax(-1)[::2]
        right = (logits.argmax(-1) == targets).sum()
    assert (logits.argmax(-1) == 0).any() and right < ROWS

    def work(layout: Layout) -> Tensor:
        peers = layout.peers("tp")
        piece = Cut("tp", 0, (vocabulary,)).piece(tuple(head.weight.shape), size, peers.rank)
        start, count = piece.spans[0]
        part = VocabularyPart(start, vocabulary, peers) if size > 1 else None
        rows = slice(start, start + count)
        return token_scores(
            hidden, targets, lambda h: F.linear(h, head.weight[rows], head.bias[rows]), chunk_size, part
        )

    wanted = torch.stack([F.cross_entropy(logits, targets, reduction="sum"), right.float()])
    for found in simulate(Layout({axis: size if axis == "tp" else 1 for axis in AXES}), work):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_scores_of_nothing_are_zero() -> None:
    hidden, targets, head = make(37, 0)
    assert token_scores(hidden, targets, head).tolist() == [0.0, 0.0]
