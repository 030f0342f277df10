"""Micro-batches made longer without changing a number: what is added is not real, not supervised and seen by no real token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtune.data.batch import IGNORED_LABEL, Batch

__all__ = ["alike", "pad", "pad_rows", "pad_to"]

_FILLERS = {"shift_labels": IGNORED_LABEL, "attention_mask": False}


def alike(batches: Sequence[Batch], multiple: int = 1) -> list[Batch]:
    """The batches with as many rows, and tokens per row, as the largest has; `multiple` divides the tokens."""
    rows = max(len(batch.input_ids) for batch in batches)
    length = max(batch.input_ids.shape[1] for batch in batches)
    length = -(-length // multiple) * multiple
    return [pad_rows(pad_to(batch, length), rows) for batch in batches]


def pad(batch: Batch, multiple: int) -> Batch:
    """The batch with a number of tokens per row that `multiple` divides."""
    length = batch.input_ids.shape[1]
    return pad_to(batch, -(-length // multiple) * multiple)


def pad_to(batch: Batch, length: int) -> Batch:
    """The batch with `length` tokens per row, at least as many as it has.

    A packed row gets one more document, at its end; padded rows get more padding on the right. Counts stay.
    """
    added = length - batch.input_ids.shape[1]
    if added < 0:
        raise ValueError(f"a batch of {batch.input_ids.shape[1]} tokens per row cannot be padded to {length}")
    if added == 0:
        return batch
    batch = batch if batch.packed else _with_mask(batch)
    names = [name for name in batch if Batch.token_axis(name) is not None]
    padded: dict[str, Any] = {name: _append(batch[name], added, _FILLERS.get(name, 0)) for name in names}
    padded["position_ids"] = _append_positions(batch, added)
    if batch.document_lengths is not None:
        padded["document_lengths"] = F.pad(batch.document_lengths, (0, 1), value=added)
    return replace(batch, **padded)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with `rows` rows, those that are added being padding throughout. A packed batch has one row and stays so."""
    added = rows - batch.input_ids.shape[0]
    if added < 0 or (added and batch.packed):
        raise ValueError(f"a {'packed ' * batch.packed}batch of {len(batch.input_ids)} rows cannot be made {rows} rows")
    if added == 0:
        return batch
    batch = _with_mask(batch)
    padded: dict[str, Any] = {
        name: torch.cat([tensor, torch.full_like(tensor[:1], _FILLERS.get(name, 0)).expand(added, -1)])
        for name, tensor in batch.items()
    }
    padded["position_ids"] = torch.cat([batch.position_ids, batch.position_ids[:1].expand(added, -1)])
    return replace(batch, **padded)


def _with_mask(batch: Batch) -> Batch:
    if batch.attention_mask is not None:
        return batch
    return replace(batch, attention_mask=torch.ones_like(batch.input_ids, dtype=torch.bool))


def _append(tensor: Tensor, added: int, value: int | bool) -> Tensor:
    return F.pad(tensor, (0, added), value=value)


def _append_positions(batch: Batch, added: int) -> Tensor:
    """A new document begins at 0; a padded row counts on."""
    steps = torch.arange(added, device=batch.position_ids.device).expand(len(batch.position_ids), -1)
    first = 0 if batch.packed else batch.position_ids[:, -1:] + 1
    return torch.cat([batch.position_ids, first + steps], dim=1)
