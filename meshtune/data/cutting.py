"""A part of a batch's tokens, cut by what each field declares about its token axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from meshtune.data.batch import IGNORED_LABEL, Batch


def take(batch: Batch, tokens: Tensor) -> Batch:
    """The batch with the tokens at these places of each row, and only what they count.

    `document_lengths` stay those of the whole row: attention needs to know where its documents end.
    """
    parts: dict[str, Any] = {
        name: tensor.index_select(axis, tokens.to(tensor.device))
        for name, tensor in batch.items()
        if (axis := batch.token_axis(name)) is not None
    }
    part = replace(batch, **parts)
    supervised = int((part.shift_labels != IGNORED_LABEL).sum())
    return replace(part, tokens=_real_tokens(batch, part, tokens), supervised_tokens=supervised)


def _real_tokens(batch: Batch, part: Batch, tokens: Tensor) -> int:
    """A packed row's real tokens come first; a filler micro-batch counts none."""
    if batch.tokens == 0:
        return 0
    if batch.packed:
        return int((tokens < batch.tokens).sum())
    return part.input_ids.numel() if part.attention_mask is None else int(part.attention_mask.sum())
