"""Bring a model's tensors together on one rank, a block at a time, from whatever layout holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.layout.pieces import Piece, Rectangle, named_pieces, whole_shape
from meshtune.models.placing import local_of, own_rectangles


@dataclass(frozen=True)
class _Entry:
    """A tensor of the model as one rank knows it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rectangles: tuple[Rectangle, ...]


class Gathering:
    """Named tensors, of which each rank holds a part or none: which rank holds what. Every rank makes it, and calls the same
    methods in the same order.

    Attributes:
        names: of any rank's tensors, in one order on all of them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece]):
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        own = {
            name: _Entry(
                whole_shape(tensor.shape, pieces.get(name)),
                tensor.dtype,
                tuple(own_rectangles(tensor, pieces.get(name))),
            )
            for name, tensor in self._tensors.items()
        }
        self._tables = _tables(own)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.names = list(dict.fromkeys(name for table in self._tables for name in table))

    def whole(self, name: str, receiver: int = 0) -> Tensor | None:
        """The whole CPU tensor on the rank `receiver`, None on others. Of a part that several hold, the first sends its own."""
        tables, rank = self._tables, self._rank
        entry = next(table[name] for table in tables if name in table)
        whole = torch.empty(entry.shape, dtype=entry.dtype) if rank == receiver else None
        told: set[tuple[int, ...]] = set()
        for source, table in enumerate(tables):
            for rectangle in table[name].rectangles if name in table else ():
                if rectangle.start in told:
                    continue
                told.add(rectangle.start)
                if source == rank:
                    part = rectangle.within(local_of(self._tensors[name])).cpu().contiguous()
                    if rank != receiver:
                        dist.send(part, dst=receiver)
                elif rank == receiver:
                    part = torch.empty(rectangle.shape, dtype=entry.dtype)
                    dist.recv(part, src=source)
                if whole is not None:
                    Rectangle(rectangle.start, rectangle.start, rectangle.shape).within(whole).copy_(part)
        return whole

    def holder(self, name: str) -> int:
        """The first rank that has a part of it."""
        return next(rank for rank, table in enumerate(self._tables) if name in table)

    def everywhere(self, name: str) -> Tensor:
        """The whole CPU tensor, on every rank."""
        whole = self.whole(name)
        if whole is None:
            entry = next(table[name] for table in self._tables if name in table)
            whole = torch.empty(entry.shape, dtype=entry.dtype)
        if len(self._tables) > 1:
            dist.broadcast(whole, src=0)
        return whole


def whole_tensors(model: nn.Module, left_out: set[str]) -> Iterator[dict[str, Tensor]]:
    """Whole CPU tensors of `model` by name, those of a block together; empty on ranks other than 0. Every rank must exhaust
    it."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    gathering = Gathering(state, named_pieces(model))
    for names in _blocks(gathering.names):
        wholes = {name: gathering.whole(name) for name in names}
        yield {name: whole for name, whole in wholes.items() if whole is not None}


def _tables(own: dict[str, _Entry]) -> list[dict[str, _Entry]]:
    if not dist.is_initialized():
        return [own]
    tables: list[dict[str, _Entry]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(tables, own)
    return tables


def _blocks(names: Iterable[str]) -> list[list[str]]:
    """Names, grouped by the first numbered part in each."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        numbered = re.match(r".*?\.\d+\.", name)
        blocks.setdefault(numbered.group() if numbered else "", []).append(name)
    return list(blocks.values())
