"""Weights in the forms of bitsandbytes: NF4 and FP4 (with scales that may be quantised themselves), and int8.

Its own functions quantise and dequantise, whatever the device. Rows of a packed weight, and columns at the borders of blocks,
with the same rows and columns of scales, are the packed form of that part of the weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshtune.models.quantization.linear import Form, Held, bits, number

_AT_ONCE = 2**22
"""Weights that are quantised in one call."""
_NESTED_BLOCK = 256
"""How many scales share a scale where scales are quantised; bitsandbytes has no other."""


@dataclass(frozen=True)
class FourBit:
    """`weight` uint8 [out, in/2], and `absmax` [out, in/block]: float32, or (double) uint8 beside `nested_absmax` and
    `nested_offset`, which belong to the weight as a whole: the offset is the mean of all its scales."""

    kind: Literal["nf4", "fp4"]
    block: int
    double: bool

    @property
    def name(self) -> str:
        return f"{self.kind}{' with quantised scales' if self.double else ''}, a scale for {self.block} weights"

    @property
    def forms(self) -> Mapping[str, Form]:
        packed = Form(torch.uint8, 2)
        if not self.double:
            return {"weight": packed, "absmax": Form(torch.int32, self.block)}
        return {
            "weight": packed,
            "absmax": Form(torch.uint8, self.block),
            "nested_absmax": Form(torch.int32, rows=False, weights_each=self.block * _NESTED_BLOCK),
            "nested_offset": Form(torch.int32, rows=False),
        }

    def quantise(self, whole: Tensor) -> dict[str, Tensor]:
        packed, scales = self._in_parts(whole)
        if not self.double:
            return {"weight": packed, "absmax": bits(scales)}
        _dynamic_code(whole.device)
        offset = scales.mean()  # as quantize_4bit does with all scales of a weight
        nested, state = _functional().quantize_blockwise(scales - offset, blocksize=_NESTED_BLOCK)
        held = {"weight": packed, "absmax": nested}
        return {**held, "nested_absmax": bits(state.absmax), "nested_offset": bits(offset.reshape(1))}

    def _in_parts(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Packed rows and their float32 scales, a few rows at a time: bitsandbytes' temporaries are several times the weight."""
        rows = max(1, _AT_ONCE // whole.shape[1])
        parts = []
        for part in whole.split(rows):
            packed, state = _functional().quantize_4bit(part.contiguous(), blocksize=self.block, quant_type=self.kind)
            parts.append((packed.view(len(part), -1), state.absmax.view(len(part), -1)))
        return torch.cat([packed for packed, _ in parts]), torch.cat([scales for _, scales in parts])

    def of_state(self, packed: Tensor, state: Any) -> dict[str, Tensor]:
        """The same of what the library has quantised: uint8 [out * in / 2, 1] and its QuantState."""
        rows = state.shape[0]
        held = {"weight": packed.view(rows, -1)}
        if not self.double:
            return {**held, "absmax": bits(state.absmax).view(rows, -1)}
        _dynamic_code(packed.device)
        nested = {"nested_absmax": bits(state.state2.absmax), "nested_offset": bits(state.offset.reshape(1))}
        return {**held, "absmax": state.absmax.view(rows, -1), **nested}

    def dense(self, held: Held, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
        functional, packed = _functional(), held["weight"]
        state = functional.QuantState(
            absmax=self._scales(held, places).reshape(-1),
            shape=torch.Size((packed.shape[0], packed.shape[1] * 2)),
            blocksize=self.block,
            quant_type=self.kind,
            dtype=dtype,
        )
        dense: Tensor = functional.dequantize_4bit(packed.reshape(-1, 1), state)
        return dense

    def _scales(self, held: Held, places: Tensor | None) -> Tensor:
        if not self.double:
            return number(held["absmax"])
        functional, nested, offset = _functional(), number(held["nested_absmax"]), number(held["nested_offset"])
        code = _dynamic_code(held["weight"].device)
        if places is not None:  # what dequantize_blockwise computes, whose blocks are those of the whole
            return code[held["absmax"].long()] * nested[places // _NESTED_BLOCK] + offset
        state = functional.QuantState(absmax=nested, code=code, blocksize=_NESTED_BLOCK, dtype=torch.float32)
        scales: Tensor = functional.dequantize_blockwise(held["absmax"].reshape(-1), state) + offset
        return scales


@dataclass(frozen=True)
class Int8:
    """`weight` int8 [out, in] and `SCB` float32 [out], each row's largest magnitude, as LLM.int8() stores them.

    Activations are not quantised: what bitsandbytes itself does on a CPU. A layer's numbers then do not depend on which other
    rows are in the batch, nor on the device.
    """

    name: str = "int8, a scale for each row"
    block: int | None = None

    @property
    def forms(self) -> Mapping[str, Form]:
        return {"weight": Form(torch.int8, 1), "SCB": Form(torch.int32)}

    def quantise(self, whole: Tensor) -> dict[str, Tensor]:
        rows, scales, _ = _functional().int8_vectorwise_quant(whole.to(torch.float16).contiguous())
        return {"weight": rows, "SCB": bits(scales)}

    def dense(self, held: Held, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
        return held["weight"].to(dtype).mul_(number(held["SCB"]).unsqueeze(1).mul(1.0 / 127.0))


def _functional() -> Any:
    import bitsandbytes.functional

    return bitsandbytes.functional


_codes: dict[torch.device, Tensor] = {}


def _dynamic_code(device: torch.device) -> Tensor:
    """The 256 values in which scales are quantised, made before the first forward: `torch.compile` could not make them in it."""
    if device not in _codes:
        _codes[device] = _functional().create_dynamic_map().to(device)
    return _codes[device]
