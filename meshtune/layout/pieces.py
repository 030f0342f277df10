"""Pieces: which part of a tensor a rank holds where an axis cuts a model itself (tp, ep).

One over `fsdp` is a shard that no rule of DTensor gives the place of: its rows were chosen by a library.

A rank's part is a plain tensor of the part's shape. Beside it, on the module that owns it, stands the `Piece` that says where
the part lies in the whole: a few spans of one dimension, so that stacked projections (`[q | k | v]`) can be cut, each of them
apart, which no placement of DTensor says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtune.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor, nn

_ATTRIBUTE = "_meshtune_pieces"
_ALIASES = "_meshtune_aliases"


@dataclass(frozen=True)
class Cut:
    """A tensor cut over `axis` along `dim`: each of the stacked `blocks` (their sizes along `dim`) into parts as equal as
    multiples of `unit` can be, of which a rank has one of each."""

    axis: str
    dim: int
    blocks: tuple[int, ...]
    unit: int = 1

    def spans(self, size: int, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, length) of what `rank` of `size` holds of each block, in the whole tensor."""
        spans, offset = [], 0
        for block in self.blocks:
            units = math.ceil(block / self.unit)
            each = math.ceil(units / size)
            start, stop = (min(k * each * self.unit, block) for k in (rank, rank + 1))
            spans.append((offset + start, stop - start))
            offset += block
        return tuple(spans)

    def piece(self, shape: tuple[int, ...], size: int, rank: int) -> Piece:
        """What `rank` holds of a tensor of `shape`."""
        dim = self.dim % len(shape)
        if sum(self.blocks) != shape[dim]:
            raise LayoutError(f"blocks {self.blocks} do not add up to dimension {dim} of a tensor of shape {shape}")
        return Piece(self.axis, tuple(shape), dim, self.spans(size, rank))


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor of `shape`: `spans` (start, length) of `dim`, one after another."""

    axis: str
    shape: tuple[int, ...]
    dim: int
    spans: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = sum(length for _, length in self.spans)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part, copied out of the whole tensor."""
        import torch

        return torch.cat([whole.narrow(self.dim, start, length) for start, length in self.spans], self.dim)

    def rectangles(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Rectangle]:
        """Where a box of the part (from `offset`, of `shape`, in the part's coordinates) lies in the whole tensor."""
        if math.prod(shape) == 0:
            return
        first, last, before = offset[self.dim], offset[self.dim] + shape[self.dim], 0
        for start, length in self.spans:
            low, high = max(first, before), min(last, before + length)
            if low < high:
                yield Rectangle(
                    _with(offset, self.dim, start + low - before),
                    _with(tuple(0 for _ in offset), self.dim, low - first),
                    _with(shape, self.dim, high - low),
                )
            before += length


@dataclass(frozen=True)
class Rectangle:
    """A box of a whole tensor that lies at `local` in a rank's own tensor."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    def within(self, tensor: Tensor) -> Tensor:
        """The view of a rank's own tensor that this box is."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def set_piece(module: nn.Module, name: str, piece: Piece) -> None:
    """Say that the parameter `name` of `module` is a part."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[name] = piece


def piece_of(module: nn.Module, name: str) -> Piece | None:
    """The piece that a module's own parameter is, or None if it is whole."""
    return module.__dict__.get(_ATTRIBUTE, {}).get(name)


def named_pieces(model: nn.Module) -> dict[str, Piece]:
    """Every part in a model, by the qualified name of its parameter or buffer; a tied one under each of its names."""
    return {
        f"{path}.{name}" if path else name: piece
        for path, module in model.named_modules()
        for name, piece in module.__dict__.get(_ATTRIBUTE, {}).items()
    }


def set_aliases(model: nn.Module, names: Mapping[str, str]) -> None:
    """Say that parameters of `model` are copies of those that other ranks hold under other names (tied ones, of a pipeline)."""
    model.__dict__[_ALIASES] = dict(names)


def aliases(model: nn.Module) -> Mapping[str, str]:
    """Names of such copies, and by what name the original goes in a checkpoint."""
    return model.__dict__.get(_ALIASES, {})


def whole_shape(shape: Any, piece: Piece | None) -> tuple[int, ...]:
    """The shape of the whole tensor of which `shape` is a rank's part."""
    return tuple(shape) if piece is None else piece.shape


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
