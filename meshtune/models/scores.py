"""Attention of some queries to some keys of one document, without a mask that is quadratic in its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True)
class Scores:
    """How a layer turns queries and keys into weights.

    `window` counts the position itself; `softcap` bounds scores by tanh; `s_aux` [heads] holds a score of nothing (a sink) for
    each head.
    """

    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    s_aux: Tensor | None = None
    window: int | None = None
    causal: bool = True

    @property
    def fused(self) -> bool:
        """Whether one kernel does it all."""
        return self.softcap is None and self.s_aux is None

    def of_heads(self, first: int, last: int) -> Scores:
        """The same for some of the heads."""
        return self if self.s_aux is None else replace(self, s_aux=self.s_aux[first:last])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool = False) -> Tensor:
        """`allowed` [queries, keys] is true where a query may see a key; None with `causal` if positions alone decide."""
        if self.fused:
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, allowed, self.dropout, causal, scale=self.scaling, enable_gqa=grouped
            )
        return self._written_out(q, k, v, allowed)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        """For soft-caps and sinks, which the fused kernel has no place for."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * (self.scaling if self.scaling is not None else q.shape[-1] ** -0.5)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if self.s_aux is not None:
            sink = self.s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
            scores = torch.cat([scores, sink], -1)
        weights = scores.float().softmax(-1)[..., : k.shape[2]].to(q.dtype)
        return F.dropout(weights, self.dropout) @ v


def attend_in_documents(q: Tensor, k: Tensor, v: Tensor, scores: Scores, lengths: Sequence[int] | None) -> Tensor:
    """[B, heads, T, value_dim] of whole rows: of documents of these lengths, or of one each."""
    lengths = [*lengths] if lengths else [q.shape[2]]
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    return torch.cat([attend_in_document(*part, scores) for part in parts], dim=2)


def attend_in_document(q: Tensor, k: Tensor, v: Tensor, scores: Scores, start: int = 0) -> Tensor:
    """Queries at places `start` and on of a document whose keys are all here, if any later ones are needed.

    At once where positions alone decide, else by blocks of queries, each with the keys that it may see.
    """
    length = k.shape[2]
    windowed = scores.window is not None and scores.window < length
    whole = start == 0 and q.shape[2] == length
    if not windowed and (not scores.causal or (scores.fused and whole)):
        return scores.attend(q, k, v, None, scores.causal)
    reach = scores.window if scores.window is not None and windowed else length
    parts = []
    for block in blocks(range(start, start + q.shape[2]), max(reach, BLOCK) if windowed else BLOCK):
        keys = range(
            max(0, block.start - reach + 1), block.stop if scores.causal else min(length, block.stop + reach - 1)
        )
        distance = _places(block, q)[:, None] - _places(keys, q)
        allowed = (distance < reach) & (distance >= (0 if scores.causal else 1 - reach))
        seen = slice(keys.start, keys.stop)
        parts.append(
            scores.attend(q[:, :, block.start - start : block.stop - start], k[:, :, seen], v[:, :, seen], allowed)
        )
    return torch.cat(parts, dim=2)


def blocks(places: range, size: int) -> Iterator[range]:
    """Runs of at most `size` of them."""
    return (range(first, min(first + size, places.stop)) for first in range(places.start, places.stop, size))


def _places(places: range, like: Tensor) -> Tensor:
    return torch.arange(places.start, places.stop, device=like.device)
