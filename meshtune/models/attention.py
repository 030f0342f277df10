"""Attention that keeps the documents of a packed row apart, through transformers' attention interface.

One causal scaled-dot-product attention per document: nothing is computed across documents and no mask is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

DOCUMENT_ATTENTION = "meshtune_documents"
_BLOCK = 256

_current_lengths: list[list[int] | None] = [None]


@contextmanager
def documents(lengths: list[int] | None) -> Iterator[None]:
    """While open, attention treats the single row of the batch as documents of these lengths.

    Some models do not hand extra keyword arguments down to attention, so the lengths cannot travel through the forward.
    Keep it open through the backward too: activation checkpointing runs attention again there, and on GPUs in another
    thread, which a context variable would not reach.
    """
    _current_lengths.append(lengths)
    try:
        yield
    finally:
        _current_lengths.pop()


def documents_open() -> bool:
    """Whether the row at hand is made of documents."""
    return _current_lengths[-1] is not None


@torch.compiler.disable
def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention per document.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim]; returns ([1, T, heads, head_dim], None).
    `sliding_window` counts the position itself; `softcap` bounds scores by tanh; `s_aux` [heads] holds a score of nothing
    (a sink) for each head. What else a model hands over is left alone: proofs.py finds out whether it mattered.
    """
    lengths = _current_lengths[-1] or [query.shape[2]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = _Scores(scaling, dropout if module.training else 0.0, softcap, s_aux)
    parts = [
        _document(*document, scores, sliding_window, causal)
        for document in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Scores:
    """How a layer turns queries and keys into weights."""

    scaling: float | None
    dropout: float
    softcap: float | None
    s_aux: Tensor | None

    @property
    def fused(self) -> bool:
        """Whether one kernel does it all."""
        return self.softcap is None and self.s_aux is None

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


def _document(q: Tensor, k: Tensor, v: Tensor, scores: _Scores, window: int | None, causal: bool) -> Tensor:
    """One document: at once where positions alone decide, else by blocks of queries, each with the keys that it may see."""
    length = q.shape[2]
    windowed = window is not None and window < length
    if not windowed and (scores.fused or not causal):
        return scores.attend(q, k, v, None, causal)
    reach = window if window is not None and windowed else length
    block = max(reach, _BLOCK) if windowed else _BLOCK
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first, last = max(0, start - reach + 1), stop if causal else min(length, stop + reach - 1)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        allowed = (distance < reach) & (distance >= (0 if causal else 1 - reach))
        parts.append(scores.attend(q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], allowed))
    return torch.cat(parts, dim=2)


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
AttentionMaskInterface.register(DOCUMENT_ATTENTION, lambda *_args, **_kwargs: None)
