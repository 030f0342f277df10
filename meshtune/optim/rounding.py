"""Weights held in bfloat16, of which no update is lost: rounded up or down by chance, or kept beside what rounding takes.

A bfloat16 has 8 binary digits. The nearest one to 1 - 0.001 is 1, so an update of that size never moves a weight of 1, however
often it comes; a running average that falls by a thousandth at each step stands still likewise.

Random numbers follow from seed, step, name and the place in the whole tensor alone, so every layout rounds alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Box", "Position", "join", "noise", "round_by_chance", "split"]

_LOW = 0xFFFF
_HALF = 0x8000


class Box(Protocol):
    """A box of a whole tensor that lies at `local` in a rank's own: see `meshtune.layout.pieces.Rectangle`."""

    @property
    def start(self) -> tuple[int, ...]: ...

    @property
    def local(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Position:
    """Which tensor of the model this rank has a part of, by its name in checkpoints, its whole shape, and where the part lies."""

    name: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]

    def rows(self, first: int, last: int, local: tuple[int, ...], device: torch.device) -> Tensor:
        """Of rows `first` to `last` of this rank's part (all dimensions but the last as one), which rows of the whole they are.

        Returns int64 [last - first].
        """
        rows = torch.arange(first, last, device=device)
        found, below, below_whole = torch.zeros_like(rows), 1, 1
        for dim in reversed(range(max(len(local) - 1, 0))):
            places = self._places(dim, local[dim], device)
            found += places[rows // below % local[dim]] * below_whole
            below, below_whole = below * local[dim], below_whole * self.shape[dim]
        return found

    def columns(self, local: tuple[int, ...], device: torch.device) -> Tensor:
        """Of the last dimension of this rank's part, int64: which places of the whole they are."""
        return self._places(len(local) - 1, local[-1] if local else 1, device)

    def _places(self, dim: int, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        for box in self.boxes if dim >= 0 else ():
            at, count = box.local[dim], box.shape[dim]
            places[at : at + count] = torch.arange(box.start[dim], box.start[dim] + count, device=device)
        return places


def noise(key: str, rows: Tensor, columns: Tensor) -> Tensor:
    """Random 16 bits for each place of a part, int32 [rows, columns] in [0, 65536): those of the same place and key always.

    Args:
        key: what they are for, with seed and step.
        rows, columns: which of the whole tensor.
    """
    first, second = (int.from_bytes(hashlib.sha256(key.encode()).digest()[k : k + 4], "little") for k in (0, 4))
    start = _mixed(rows.to(torch.int32) ^ _signed(first)) + _signed(second)
    return _mixed(start[:, None] + columns.to(torch.int32)).bitwise_and_(_LOW)


def round_by_chance(values: Tensor, noise: Tensor) -> Tensor:
    """float32 values as bfloat16: the neighbour above or below, each as likely as it is near, so that the mean is the value.

    Args:
        values: float32; what a bfloat16 can hold stays as it is.
        noise: int32 in [0, 65536), of the same shape.
    """
    bits = (values.view(torch.int32) + noise).bitwise_and_(~_LOW).view(torch.float32)
    return torch.where(values.isnan(), values, bits).to(torch.bfloat16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as the nearest bfloat16 and the rest that this takes away, int16 in units of the last binary digit."""
    bits = values.view(torch.int32)
    high = (bits + _HALF) >> 16
    rest = (bits - (high << 16)).to(torch.int16)
    nearest = high.to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), values.to(torch.bfloat16), nearest), rest


def join(weights: Tensor, rest: Tensor) -> Tensor:
    """The float32 values that `split` has divided."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)


def _mixed(numbers: Tensor) -> Tensor:
    """Each 32-bit number made another one that looks random, in place: C. Wellons' `lowbias32` (2018, public domain)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        numbers ^= (numbers >> shift) & ((1 << (32 - shift)) - 1)
        if factor != 1:
            numbers *= _signed(factor)
    return numbers


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
