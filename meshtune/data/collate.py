"""Documents to one Batch: padded rows, or one packed row. Padding is known from lengths, never from a token
id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshtune.data.batch import IGNORED_LABEL, Batch


class Window(NamedTuple):
    """A part of a document that goes on: input_ids [T] int64, supervised [T] bool, and the token after it, the target of the
    last position.
    """

    input_ids: NDArray[np.int64]
    supervised: NDArray[np.bool_]
    following: int


Document = tuple[NDArray[np.int64], NDArray[np.bool_]] | Window


def collate_padded(documents: Sequence[Document], pad_token_id: int) -> Batch:
    """Return a row for each document (input_ids [T], supervised [T]) or window, padded on the right to the longest."""
    lengths = [len(document[0]) for document in documents]
    shape = len(documents), max(lengths)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        input_ids[row, :length] = document[0]
        labels[row, :length] = shifted_labels(document)
        mask[row, :length] = True
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.arange(shape[1]).repeat(shape[0], 1),
        shift_labels=torch.from_numpy(labels),
        attention_mask=None if mask.all() else torch.from_numpy(mask),
        tokens=sum(lengths),
        supervised_tokens=int((labels != IGNORED_LABEL).sum()),
    )


def collate_packed(documents: Sequence[Document]) -> Batch:
    """Return one row [1, N] of all documents; positions restart and no label crosses a border."""
    lengths = [len(document[0]) for document in documents]
    labels = np.concatenate([shifted_labels(document) for document in documents])
    return Batch(
        input_ids=torch.from_numpy(np.concatenate([document[0] for document in documents]))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        shift_labels=torch.from_numpy(labels)[None],
        document_lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens=sum(lengths),
        supervised_tokens=int((labels != IGNORED_LABEL).sum()),
    )


def as_filler(batch: Batch) -> Batch:
    """Return the batch with nothing to learn and nothing counted: it keeps collectives aligned, and no number
    moves.
    """
    labels = torch.full_like(batch.shift_labels, IGNORED_LABEL)
    return replace(batch, shift_labels=labels, tokens=0, supervised_tokens=0)


def shifted_labels(document: Document) -> NDArray[np.int64]:
    """Return [T] int64: at t the id of token t+1 if that one is supervised, else -100; the last position has
    none, but in a window.
    """
    ids, supervised = document[0], document[1]
    labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
    labels[:-1][supervised[1:]] = ids[1:][supervised[1:]]
    if isinstance(document, Window):
        labels[-1] = document.following
    return labels
