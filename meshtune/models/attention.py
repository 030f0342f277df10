"""Attention that keeps the documents of a packed row apart, through transformers' attention interface.

One causal scaled-dot-product attention per document: nothing is computed across documents and no mask is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

DOCUMENT_ATTENTION = "meshtune_documents"

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
    """
    lengths = _current_lengths[-1] or [query.shape[2]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        window = sliding_window if sliding_window is not None and sliding_window < q.shape[2] else None
        if softcap is None and s_aux is None:
            parts.append(_fused(q, k, v, scaling, dropout, window, causal))
        else:
            parts.append(_explicit(q, k, v, scaling, dropout, window, causal, softcap, s_aux, module.training))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None, causal: bool
) -> Tensor:
    mask = None if window is None else _allowed(q.shape[2], window, causal, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    causal: bool,
    softcap: float | None,
    s_aux: Tensor | None,
    training: bool,
) -> Tensor:
    """The same, written out for score soft-capping and attention sinks, which the fused kernel has no place for."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal or window is not None:
        scores = scores.masked_fill(~_allowed(q.shape[2], window, causal, q.device), torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, sink], -1).float().softmax(-1)[..., :-1].to(q.dtype)
    else:
        weights = scores.float().softmax(-1).to(q.dtype)
    return F.dropout(weights, dropout, training) @ v


def _allowed(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """[length, length], True where a query (row) may see a key (column)."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return allowed if window is None else allowed & (distance.abs() < window)


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
AttentionMaskInterface.register(DOCUMENT_ATTENTION, lambda *_args, **_kwargs: None)
