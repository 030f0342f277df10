"""Bring a model's tensors together on one rank, a block at a time, from whatever layout holds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.layout.pieces import Rectangle, named_pieces, whole_shape
from meshtune.models.placing import local_of, own_rectangles


@dataclass(frozen=True)
class _Entry:
    """A tensor of the model as one rank knows it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rectangles: tuple[Rectangle, ...]


def whole_tensors(model: nn.Module, left_out: set[str]) -> Iterator[dict[str, Tensor]]:
    """Whole CPU tensors of `model` by name, those of a block together; empty on ranks other than 0. Every rank must exhaust it.

    Of parts that several ranks hold, the first of them sends its own.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in left_out}
    pieces = named_pieces(model)
    own = {
        name: _Entry(
            whole_shape(tensor.shape, pieces.get(name)), tensor.dtype, tuple(own_rectangles(tensor, pieces.get(name)))
        )
        for name, tensor in state.items()
    }
    tables = _tables(own)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for names in _blocks(tables):
        block: dict[str, Tensor] = {}
        for name in names:
            whole = _gather(name, state.get(name), tables, rank)
            if whole is not None:
                block[name] = whole
        yield block


def _tables(own: dict[str, _Entry]) -> list[dict[str, _Entry]]:
    if not dist.is_initialized():
        return [own]
    tables: list[dict[str, _Entry]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(tables, own)
    return tables


def _blocks(tables: list[dict[str, _Entry]]) -> list[list[str]]:
    """Every name of any rank, grouped by the first numbered part in it."""
    blocks: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        numbered = re.match(r".*?\.\d+\.", name)
        blocks.setdefault(numbered.group() if numbered else "", []).append(name)
    return list(blocks.values())


def _gather(name: str, tensor: Tensor | None, tables: list[dict[str, _Entry]], rank: int) -> Tensor | None:
    entry = next(table[name] for table in tables if name in table)
    whole = torch.empty(entry.shape, dtype=entry.dtype) if rank == 0 else None
    told: set[tuple[int, ...]] = set()
    for source, table in enumerate(tables):
        for rectangle in table[name].rectangles if name in table else ():
            if rectangle.start in told:
                continue
            told.add(rectangle.start)
            if source == rank:
                assert tensor is not None
                part = rectangle.within(local_of(tensor)).cpu().contiguous()
                if rank != 0:
                    dist.send(part, dst=0)
            elif rank == 0:
                part = torch.empty(rectangle.shape, dtype=entry.dtype)
                dist.recv(part, src=source)
            if whole is not None:
                Rectangle(rectangle.start, rectangle.start, rectangle.shape).within(whole).copy_(part)
    return whole
