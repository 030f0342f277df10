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
    real = batch.real_tokens.index_select(1, tokens.to(batch.input_ids.device))
    return replace(
        part,
        real=real if batch.packed else None,
        tokens=int(real.sum()),
        supervised_tokens=int((part.shift_labels != IGNORED_LABEL).sum()),
    )
