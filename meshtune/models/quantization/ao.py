"""Weights in the forms of torchao's weight-only quantisation: int8 with a scale a row, int4 with one for a block of a row.

torchao's own functions quantise and dequantise. Its four-bit integers come one in a byte; two of them are packed into one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshtune.models.quantization.linear import Form, Held, bits, number

_RANGE = {8: (-128, 127), 4: (-8, 7)}


@dataclass(frozen=True)
class Integers:
    """`weight` int8 [out, in], or uint8 [out, in/2] of two four-bit integers each (the first in the high half), and `scale`
    float32 [out] or [out, in/block]. Zero is zero: there is no offset."""

    width: int
    block: int | None

    @property
    def name(self) -> str:
        return f"int{self.width}, a scale for {f'{self.block} weights' if self.block else 'each row'}"

    @property
    def forms(self) -> Mapping[str, Form]:
        weight = Form(torch.int8, 1) if self.width == 8 else Form(torch.uint8, 2)
        return {"weight": weight, "scale": Form(torch.int32, self.block)}

    def quantise(self, whole: Tensor) -> dict[str, Tensor]:
        ao, (low, high) = _primitives(), _RANGE[self.width]
        whole, block = whole.float(), (1, self.block or whole.shape[1])
        scale, zero = ao.choose_qparams_affine(
            whole,
            ao.MappingType.SYMMETRIC,
            block,
            torch.int8,
            low,
            high,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int8,
            keepdim=True,
            eps=torch.finfo(torch.float32).eps,
        )
        values = ao.quantize_affine(whole, block, scale, zero, torch.int8, low, high)
        held = values if self.width == 8 else _packed(values)
        return {"weight": held, "scale": bits(scale) if self.block else bits(scale).reshape(-1)}

    def dense(self, held: Held, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
        ao, (low, high) = _primitives(), _RANGE[self.width]
        values = held["weight"] if self.width == 8 else _unpacked(held["weight"])
        scale = number(held["scale"]).reshape(len(values), -1)
        block = (1, values.shape[1] // scale.shape[1])
        zero = torch.zeros_like(scale, dtype=torch.int8)
        dense: Tensor = ao.dequantize_affine(values, block, scale, zero, torch.int8, low, high, output_dtype=dtype)
        return dense


def _packed(values: Tensor) -> Tensor:
    """int8 in -8..7 [out, in] to uint8 [out, in/2]."""
    halves = values.view(torch.uint8) & 0xF
    return (halves[:, ::2] << 4) | halves[:, 1::2]


def _unpacked(packed: Tensor) -> Tensor:
    """uint8 [out, in/2] to int8 in -8..7 [out, in]."""
    signed = packed.view(torch.int8)
    return torch.stack((signed >> 4, (signed << 4) >> 4), -1).flatten(1)


def _primitives() -> Any:
    from torchao.quantization import quant_primitives

    return quant_primitives
