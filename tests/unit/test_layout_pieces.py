"""Which part of a tensor a rank holds: nothing twice, nothing lost, and each part finds its place in the whole again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from meshtune.errors import LayoutError
from meshtune.layout import Group
from meshtune.layout.pieces import Cut, Piece, named_pieces, piece_of, set_piece, whole_shape


@pytest.mark.parametrize(
    ("blocks", "unit", "size", "spans"),
    [
        ((8,), 1, 2, [((0, 4),), ((4, 4),)]),
        # A vocabulary of 97: as equal as can be, the last has what is left.
        ((97,), 1, 2, [((0, 49),), ((49, 48),)]),
        ((97,), 1, 4, [((0, 25),), ((25, 25),), ((50, 25),), ((75, 22),)]),
        # Fewer rows than ranks need: somebody has none.
        ((5,), 1, 4, [((0, 2),), ((2, 2),), ((4, 1),), ((5, 0),)]),
        # q, k and v of 4 query heads and 2 key heads of 3: each has its part of each.
        ((12, 6, 6), 1, 2, [((0, 6), (12, 3), (18, 3)), ((6, 6), (15, 3), (21, 3))]),
        # Whole heads of 4.
        ((12,), 4, 2, [((0, 8),), ((8, 4),)]),
        ((10,), 4, 2, [((0, 8),), ((8, 2),)]),
    ],
)
def test_spans(blocks: tuple[int, ...], unit: int, size: int, spans: list[tuple[tuple[int, int], ...]]) -> None:
    assert [Cut("tp", 0, blocks, unit).spans(size, rank) for rank in range(size)] == spans


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_one_owner_and_comes_back_to_its_place(seed: int) -> None:
    """Also when data parallelism has cut a rank's part once more, into boxes that know nothing of spans."""
    chance = random.Random(seed)
    blocks = tuple(chance.randint(1, 12) for _ in range(chance.randint(1, 3)))
    dim, size, unit = chance.randint(0, 2), chance.randint(1, 5), chance.choice([1, 1, 2, 3])
    shape = [3, 4, 5]
    shape[dim] = sum(blocks)
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    again = torch.zeros_like(whole)
    for rank in range(size):
        piece = Cut("tp", dim, blocks, unit).piece(tuple(shape), size, rank)
        own = piece.of(whole)
        assert tuple(own.shape) == piece.local_shape
        for part in filter(len, torch.arange(own.shape[0]).chunk(chance.randint(1, 3))):
            offset, box = (int(part[0]), 0, 0), (len(part), *own.shape[1:])
            local = own.narrow(0, offset[0], box[0])
            for rectangle in piece.rectangles(offset, box):
                place = tuple(
                    slice(start, start + n) for start, n in zip(rectangle.start, rectangle.shape, strict=True)
                )
                assert not again[place].any(), "held by two"
                again[place] = rectangle.within(local)
    assert torch.equal(again, whole)


def test_a_box_without_rows_lies_nowhere() -> None:
    piece = Cut("tp", 0, (5,)).piece((5, 2), 4, 3)
    assert piece.local_shape == (0, 2) and list(piece.rectangles((0, 0), (0, 2))) == []


def test_blocks_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(
        LayoutError, match=r"blocks \(4, 4\) do not add up to dimension 1 of a tensor of shape \(3, 9\)"
    ):
        Cut("tp", -1, (4, 4)).piece((3, 9), 2, 0)


@pytest.mark.parametrize(
    ("count", "size", "spans"),
    [
        (4, 2, [(10, 12), (22, 12)]),
        # Two key heads of 6 among four ranks: neighbours need the same.
        (2, 4, [(10, 12), (10, 12), (22, 12), (22, 12)]),
        (1, 3, [(10, 24), (10, 24), (10, 24)]),
    ],
)
def test_ranks_share_a_head_where_there_are_fewer_than_ranks(
    count: int, size: int, spans: list[tuple[int, int]]
) -> None:
    assert [Group(10, 24, count).span(size, rank) for rank in range(size)] == spans


def test_a_piece_is_known_by_the_name_of_its_parameter_and_a_tied_one_by_both() -> None:
    model = nn.Module()
    model.embedding, model.head, model.norm = nn.Embedding(8, 2), nn.Linear(2, 8, bias=False), nn.LayerNorm(2)
    piece = Cut("tp", 0, (8,)).piece((8, 2), 2, 1)
    for module in (model.embedding, model.head):
        set_piece(module, "weight", piece)
    assert named_pieces(model) == {"embedding.weight": piece, "head.weight": piece}
    assert piece_of(model.norm, "weight") is None
    assert whole_shape((4, 2), piece) == (8, 2) and whole_shape((2,), None) == (2,)
    assert named_pieces(nn.Sequential(model)) == {"0.embedding.weight": piece, "0.head.weight": piece}


def test_the_piece_of_one_rank_is_the_whole() -> None:
    whole = torch.arange(12).reshape(4, 3)
    piece = Cut("ep", 0, (4,)).piece((4, 3), 1, 0)
    assert piece == Piece("ep", (4, 3), 0, ((0, 4),)) and torch.equal(piece.of(whole), whole)
