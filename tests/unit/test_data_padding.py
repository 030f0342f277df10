"""Padding of micro-batches: no count moves, nothing that is added is real or supervised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshtune.data.batch import Batch
from meshtune.data.collate import collate_packed, collate_padded
from meshtune.data.padding import alike, pad, pad_rows, pad_to


def documents(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.arange(1, n + 1), np.arange(n) > 0) for n in lengths]


def supervised(batch: Batch) -> int:
    return int((batch.shift_labels != -100).sum())


def test_a_packed_row_gets_one_document_that_is_not_supervised() -> None:
    batch = collate_packed(documents(3, 5))
    longer = pad_to(batch, 12)
    assert longer.document_lengths.tolist() == [3, 5, 4] and longer.attention_mask is None
    assert longer.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert longer.input_ids.shape == longer.shift_labels.shape == (1, 12)
    assert (longer.tokens, longer.supervised_tokens) == (8, 6) == (batch.tokens, supervised(longer))


@pytest.mark.parametrize("lengths", [(3, 5), (5, 5)], ids=["uneven", "without padding"])
def test_padded_rows_get_more_padding(lengths: tuple[int, int]) -> None:
    batch = collate_padded(documents(*lengths), pad_token_id=7)
    longer = pad_to(batch, 8)
    assert longer.attention_mask.sum(1).tolist() == list(lengths)
    assert longer.position_ids.tolist() == [list(range(8))] * 2
    assert (longer.tokens, longer.supervised_tokens) == (batch.tokens, batch.supervised_tokens)
    assert supervised(longer) == batch.supervised_tokens
    assert torch.equal(longer.input_ids[:, :5], batch.input_ids)


def test_a_multiple_is_reached_with_the_least_padding() -> None:
    batch = collate_packed(documents(3, 5))
    assert [pad(batch, n).input_ids.shape[1] for n in (1, 2, 3, 5, 8, 16)] == [8, 8, 9, 10, 8, 16]
    assert pad(batch, 4) is batch


def test_added_rows_are_padding_throughout() -> None:
    batch = collate_padded(documents(3, 5), pad_token_id=7)
    more = pad_rows(batch, 4)
    assert more.attention_mask.sum(1).tolist() == [3, 5, 0, 0] and supervised(more) == supervised(batch)
    assert more.position_ids.tolist() == [list(range(5))] * 4 and more.tokens == batch.tokens == 8
    assert pad_rows(batch, 2) is batch


def test_batches_are_made_alike() -> None:
    batches = [collate_padded(documents(*lengths), pad_token_id=7) for lengths in ((3, 5), (7,), (2, 2))]
    made = alike(batches, multiple=4)
    assert {batch.input_ids.shape for batch in made} == {(2, 8)}
    assert [(b.tokens, b.supervised_tokens) for b in made] == [(b.tokens, b.supervised_tokens) for b in batches]
    packed = alike([collate_packed(documents(3, 5)), collate_packed(documents(6))])
    assert [batch.document_lengths.tolist() for batch in packed] == [[3, 5], [6, 2]]


def test_what_cannot_be_padded_is_an_error() -> None:
    batch = collate_packed(documents(3, 5))
    with pytest.raises(ValueError, match="8 tokens per row cannot be padded to 7"):
        pad_to(batch, 7)
    with pytest.raises(ValueError, match="packed batch of 1 rows cannot be made 2 rows"):
        pad_rows(batch, 2)
