"""Cross entropy of a model's head in chunks of rows: full `[tokens, vocabulary]` logits never exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["VocabularyPart", "default_chunk_size", "linear_cross_entropy", "token_scores"]

Head = Callable[[Tensor], Tensor]


class Peers(Protocol):
    """The ranks that share a vocabulary: see `meshtune.layout.peers`."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor: ...

    def all_gather(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of a vocabulary of `size` from `start` on that this rank's head has, and the ranks that have the others."""

    start: int
    size: int
    peers: Peers


LOGITS_BUDGET_BYTES = 64 * 2**20
MINIMUM_ROWS = {"cpu": 256}
MINIMUM_ROWS_ON_ACCELERATORS = 2048
_LOWEST = torch.finfo(torch.float32).min


def linear_cross_entropy(
    hidden_states: Tensor,
    targets: Tensor,
    head: Head,
    head_parameters: Sequence[nn.Parameter],
    chunk_size: int | None = None,
    vocabulary: VocabularyPart | None = None,
    gradient_scale: float = 1.0,
) -> Tensor:
    """Sum over rows of `-log softmax(head(hidden_states))[target]`, in float32.

    Equals `F.cross_entropy(head(hidden_states).float(), targets, reduction="sum")`, values and gradients. The
    gradient is computed chunk by chunk in the forward and scaled by the incoming gradient in the backward, so
    that, beside what the head itself keeps for one chunk, one `[chunk, vocabulary]` float32 tensor and two
    `[vocabulary, hidden]` gradients are alive at a time.

    Args:
        hidden_states: `[n, hidden]`, any float dtype; n may be 0, which gives exactly 0.0 and exactly zero
            gradients.
        targets: `[n]` int64, every one in `[0, vocabulary)`.
        head: `[m, hidden]` to final logits `[m, vocabulary]`, with the architecture's own scaling,
            soft-capping and bias. It is called once a chunk, so a different number of times on ranks with
            different n: it must not communicate.
        head_parameters: every parameter that `head` reads; those that are frozen get no gradient. The
            gradient of each is summed over chunks in float32, scaled, then cast to the parameter's dtype.
        chunk_size: most rows at once; None takes `default_chunk_size`.
        vocabulary: where the head gives the logits of a part of the vocabulary only. Rows and targets are the same on all its
            ranks, and so are the result and the gradient of `hidden_states`. Ranks exchange three numbers a row, never logits.
        gradient_scale: what the incoming gradient is expected to be. Gradients are computed multiplied by it, so that in float16
            they under- and overflow as those of the scaled loss would; another incoming gradient costs precision, no more.

    Returns:
        0-d float32. Its backward can run once.

    Raises:
        ValueError: chunk_size < 1, shapes that do not match, or a head that reads a trainable parameter which
            `head_parameters` lacks (its gradient would be lost in silence).
    """
    if hidden_states.ndim != 2 or targets.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"want hidden_states [n, hidden] and targets [n], got {[*hidden_states.shape]} and {[*targets.shape]}"
        )
    if chunk_size is None:
        chunk_size = _chunk_size(hidden_states, head, vocabulary)
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, want at least 1 row")
    parameters = list({id(p): p for p in head_parameters}.values())
    if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden_states, *parameters)):
        return _LinearCrossEntropy.apply(
            hidden_states, targets, head, chunk_size, vocabulary, gradient_scale, *parameters
        )
    return token_scores(hidden_states, targets, head, chunk_size, vocabulary)[0]


@torch.no_grad()
def token_scores(
    hidden_states: Tensor,
    targets: Tensor,
    head: Head,
    chunk_size: int | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """`[2]` float32: the sum of `linear_cross_entropy`, and of how many rows the target has the largest logit.

    Of equal logits the one of the lowest id counts as the largest, as `argmax` has it. Arguments as in `linear_cross_entropy`;
    there is no gradient.
    """
    scores = hidden_states.new_zeros(2, dtype=torch.float32)
    for rows in _chunks(len(hidden_states), chunk_size or _chunk_size(hidden_states, head, vocabulary)):
        logits = head(hidden_states[rows]).float()
        if vocabulary is None:
            loss_sum = nn.functional.cross_entropy(logits, targets[rows], reduction="sum")
            likeliest = logits.argmax(-1)
        else:
            likeliest = _likeliest(logits, vocabulary)
            loss_sum = _cross_entropy_and_gradient(logits, targets[rows], vocabulary)[0]
        scores += torch.stack([loss_sum, (likeliest == targets[rows]).sum()])
    return scores


def _likeliest(logits: Tensor, vocabulary: VocabularyPart) -> Tensor:
    """[m] int64: the id of each row's largest logit over all ranks."""
    if logits.shape[1]:
        largest, index = logits.max(-1)
    else:
        largest = index = logits.new_full((len(logits),), -math.inf)
    # Ids fit into float32: no vocabulary has 2^24 entries.
    told = vocabulary.peers.all_gather(torch.stack([largest, index.to(largest) + vocabulary.start]))  # [ranks, 2, m]
    best = told[:, 0] == told[:, 0].amax(0)
    return torch.where(best, told[:, 1], math.inf).amin(0).long()


def _chunk_size(hidden_states: Tensor, head: Head, vocabulary: VocabularyPart | None) -> int:
    if vocabulary is None:
        vocabulary_size = head(hidden_states[:0]).shape[-1]
    else:  # parts may differ in size, but ranks exchange numbers chunk by chunk
        vocabulary_size = math.ceil(vocabulary.size / vocabulary.peers.size)
    return default_chunk_size(vocabulary_size, hidden_states.device)


def default_chunk_size(vocabulary_size: int, device: torch.device) -> int:
    """Rows a chunk: 64 MiB of float32 logits, but never so few that adding up the weight gradient dominates.

    Every chunk writes and adds a `[vocabulary, hidden]` gradient, a cost that only rows spread out. Measured
    on 2 CPU threads, fp32, vocabulary 49152, hidden 576, 1536 rows, forward and backward: 5.0 s with 32 rows,
    3.1 s with 64, 2.4 s with 128, 2.0 s with 256 (48 MiB) and no better from 512 (96 MiB) on, hence 256 rows
    as the least on CPU. Accelerators have about ten times the arithmetic for each byte of memory bandwidth,
    hence 2048 rows as the least there (an estimate, not a measurement).
    """
    least = MINIMUM_ROWS.get(device.type, MINIMUM_ROWS_ON_ACCELERATORS)
    return max(least, LOGITS_BUDGET_BYTES // (4 * max(1, vocabulary_size)))


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward, while a chunk's logits exist, and keeps only them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        targets: Tensor,
        head: Head,
        chunk_size: int,
        vocabulary: VocabularyPart | None,
        gradient_scale: float,
        *parameters: nn.Parameter,
    ) -> Tensor:
        trainable = [p for p in parameters if p.requires_grad]
        hidden_gradient = torch.empty_like(hidden_states) if hidden_states.requires_grad else None
        gradients: list[Tensor | None] = [None] * len(trainable)
        loss_sum = hidden_states.new_zeros((), dtype=torch.float32)
        for rows in _chunks(len(hidden_states), chunk_size):
            chunk = hidden_states[rows].detach().requires_grad_(hidden_gradient is not None)
            with torch.enable_grad():
                logits = head(chunk)
            if rows.start == 0:
                _check_complete(logits, [chunk, *trainable])
            chunk_loss, gradient = _cross_entropy_and_gradient(logits.detach(), targets[rows], vocabulary)
            loss_sum += chunk_loss
            logits_gradient = (gradient if gradient_scale == 1.0 else gradient.mul_(gradient_scale)).to(logits.dtype)
            inputs = [*([] if hidden_gradient is None else [chunk]), *trainable]
            parts = list(torch.autograd.grad(logits, inputs, logits_gradient, allow_unused=True))
            if hidden_gradient is not None:
                _fill(hidden_gradient[rows], parts.pop(0))
            gradients = [_added(total, part) for total, part in zip(gradients, parts, strict=True)]
        if hidden_gradient is not None and vocabulary is not None:
            hidden_gradient = vocabulary.peers.all_reduce(hidden_gradient)
        ctx.hidden_gradient = hidden_gradient
        own = (torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trainable, strict=True))
        ctx.parameter_gradients = [next(own) if p.requires_grad else None for p in parameters]
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.gradient_scale = gradient_scale
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.parameter_gradients is None:
            raise RuntimeError("linear_cross_entropy keeps its gradients for one backward only; compute the loss again")
        scale = grad_outputs[0] / ctx.gradient_scale
        hidden_gradient, parameter_gradients = ctx.hidden_gradient, ctx.parameter_gradients
        ctx.hidden_gradient = ctx.parameter_gradients = None
        scaled = [
            None if g is None else g.mul_(scale).to(dtype)
            for g, dtype in zip(parameter_gradients, ctx.dtypes, strict=True)
        ]
        return (None if hidden_gradient is None else hidden_gradient.mul_(scale), *[None] * 5, *scaled)


def _chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """The fewest slices of at most `chunk_size` rows, of even length: a short last one would cost as much."""
    count = math.ceil(rows / chunk_size)
    for index in range(count):
        yield slice(index * rows // count, (index + 1) * rows // count)


def _cross_entropy_and_gradient(
    logits: Tensor, targets: Tensor, vocabulary: VocabularyPart | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of `logits` [m, V], summed, and its gradient (softmax minus one-hot) in float32.

    One float32 buffer serves as log-softmax and then as gradient: autograd would hold three.
    """
    if vocabulary is not None:
        return _of_a_part(logits, targets, vocabulary)
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    index = targets.unsqueeze(-1)
    loss_sum = -log_probabilities.gather(-1, index).sum()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(-1, index, gradient.new_full((1, 1), -1.0).expand_as(index))
    return loss_sum, gradient


def _of_a_part(logits: Tensor, targets: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """The same where `logits` [m, v] are those of a part of the vocabulary: the loss of the whole, the gradient of the part.

    Of each row a rank tells its largest logit, the sum of exponentials below it, and the target's logit if it has it.
    """
    width = logits.shape[1]
    # A rank without any row of a small vocabulary tells of one that no other logit is below.
    gradient = logits.float() if width else logits.new_full((len(logits), 1), _LOWEST, dtype=torch.float32)
    index = targets - vocabulary.start
    own = (index >= 0) & (index < width)
    index = torch.where(own, index, 0).unsqueeze(-1)
    largest = gradient.amax(-1)
    target = torch.where(own, gradient.gather(-1, index).squeeze(-1), 0.0)
    gradient = (gradient - largest.unsqueeze(-1)).exp_()
    told = vocabulary.peers.all_gather(torch.stack([largest, gradient.sum(-1), target]))  # [ranks, 3, m]
    top = told[:, 0].amax(0)
    total = (told[:, 1] * (told[:, 0] - top).exp()).sum(0)
    loss_sum = (top + total.log() - told[:, 2].sum(0)).sum()
    gradient.mul_(((largest - top).exp() / total).unsqueeze(-1))
    gradient.scatter_add_(-1, index, -own.to(gradient.dtype).unsqueeze(-1))
    return loss_sum, gradient[:, :width]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum in float32. The first part is taken as it is: a tensor of zeros as large as the head would cost a pass over it."""
    if part is None:
        return total
    return part.float() if total is None else total.add_(part)


def _fill(destination: Tensor, part: Tensor | None) -> None:
    if part is None:
        destination.zero_()
    else:
        destination.copy_(part)


def _check_complete(logits: Tensor, inputs: Sequence[Tensor]) -> None:
    """Refuse a head that reads a trainable leaf which is not among `inputs`."""
    known = {id(t) for t in inputs}
    borders = {t.grad_fn for t in inputs if t.grad_fn is not None}
    pending, seen = [logits.grad_fn], set(borders)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"the head reads a trainable parameter of shape {[*leaf.shape]} that head_parameters lacks: "
                "its gradient would be lost"
            )
        pending.extend(parent for parent, _ in node.next_functions)
