"""The cut of a batch over context-parallel ranks: every token once, with the position and label that it has in the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshtune.data.batch import Batch
from meshtune.data.collate import as_filler, collate_packed, collate_padded
from meshtune.layout import zigzag
from meshtune.parallel.context import cut


class _Place:
    """A rank among peers that never meet."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank


def _parts(batch: Batch, size: int, multiple: int = 1) -> list[Batch]:
    places: list[Any] = [_Place(size, rank) for rank in range(size)]
    return [cut(batch, place, multiple) for place in places]


def _documents(*lengths: int) -> list:
    """Documents of which every third token is not supervised."""
    ids = np.arange(1, 1 + sum(lengths))
    return [(part, part % 3 != 0) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_each_rank_has_an_early_chunk_and_a_late_one() -> None:
    """C54: ids, positions and labels by one permutation; positions restart where documents do, not where chunks do."""
    parts = _parts(collate_packed(_documents(3, 5)), 2)
    assert [part.input_ids.tolist() for part in parts] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
    assert [part.position_ids.tolist() for part in parts] == [[[0, 1, 3, 4]], [[2, 0, 1, 2]]]
    assert [part.shift_labels.tolist() for part in parts] == [[[2, -100, 8, -100]], [[-100, 5, -100, 7]]]
    assert [part.document_lengths.tolist() for part in parts if part.document_lengths is not None] == [[3, 5]] * 2


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("collate", [collate_packed, lambda rows: collate_padded(rows, 0)], ids=["packed", "padded"])
def test_parts_hold_every_token_once_and_count_what_the_whole_counts(collate: Any, size: int, multiple: int) -> None:
    batch = collate(_documents(13, 1, 6, 9))
    parts = _parts(batch, size, multiple)
    rows, length = batch.input_ids.shape
    assert {part.input_ids.shape for part in parts} == {(rows, part.input_ids.shape[1]) for part in parts}
    assert all(part.input_ids.shape[1] % multiple == 0 for part in parts)
    assert sum(part.tokens for part in parts) == batch.tokens
    assert sum(part.supervised_tokens for part in parts) == batch.supervised_tokens
    for name in ("input_ids", "position_ids", "shift_labels"):
        joined = zigzag.in_sequence(torch.cat([part[name] for part in parts], 1), 1, size)
        real = ... if batch.attention_mask is None else batch.attention_mask
        assert torch.equal(joined[:, :length][real], batch[name][real])


def test_padding_never_passes_the_positions_that_a_model_has() -> None:
    parts = _parts(collate_padded(_documents(7, 4), 0), 3)
    assert max(int(part.position_ids.max()) for part in parts) == 6


@pytest.mark.parametrize("collate", [collate_packed, lambda rows: collate_padded(rows, 0)], ids=["packed", "padded"])
def test_a_filler_counts_nothing_anywhere(collate: Any) -> None:
    parts = _parts(as_filler(collate(_documents(13, 6))), 2)
    assert [(part.tokens, part.supervised_tokens) for part in parts] == [(0, 0)] * 2


def test_one_rank_has_the_batch_itself() -> None:
    batch = collate_packed(_documents(3, 5))
    assert _parts(batch, 1) == [batch]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_orders_are_inverse_to_each_other(size: int) -> None:
    length = 2 * size * 3
    joined = torch.cat([zigzag.own_tokens(length, size, rank) for rank in range(size)])
    assert torch.equal(zigzag.in_sequence(joined, 0, size), torch.arange(length))
    assert torch.equal(zigzag.by_rank(torch.arange(length), 0, size), joined)
    with pytest.raises(ValueError, match="equal chunks"):
        zigzag.own_tokens(length + 1, size, 0)
