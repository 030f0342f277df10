"""`quantization:`, in how many bits frozen weights are held."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from meshtune.config import Section

_OF_TYPE = {
    "nf4": ("bitsandbytes",),
    "fp4": ("bitsandbytes",),
    "int8": ("bitsandbytes", "torchao"),
    "int4": ("torchao",),
}
_BLOCKS = {"nf4": (32, 64, 128, 256, 512, 1024), "fp4": (32, 64, 128, 256, 512, 1024), "int4": (32, 64, 128, 256)}
BLOCK = {"nf4": 64, "fp4": 64, "int4": 128}
"""How many weights of a row share a scale, where the recipe says nothing."""


class QuantizationSection(Section):
    """Frozen weights in few bits (QLoRA): the linear layers of the model's repeated blocks, but no head, embedding or router."""

    foreign: ClassVar[dict[str, str]] = {
        "load_in_4bit": "type: nf4",
        "load_in_8bit": "type: int8",
        "bnb_4bit_quant_type": "type",
        "quant_method": "backend",
        "quantization_bit": "type",
        "bnb_4bit_use_double_quant": "double_quant",
        "use_bnb_nested_quant": "double_quant",
        "bnb_4bit_blocksize": "block_size",
        "group_size": "block_size",
        "llm_int8_skip_modules": "exclude_modules",
        "modules_to_not_convert": "exclude_modules",
    }

    type: Literal["nf4", "fp4", "int8", "int4"] = Field(
        "nf4",
        description="Four-bit normal floats (as QLoRA), four-bit floats, or integers with a scale for a row or a block.",
    )
    backend: Literal["bitsandbytes", "torchao"] | None = Field(
        None, description="The library that quantises. Default: torchao for `int4`, bitsandbytes for every other type."
    )
    qat: bool = Field(
        False,
        description="Quantisation-aware training, without `peft:`: all weights are trained in float, and each forward sees them "
        "rounded to `int4` (in blocks) or `int8` (by rows), and activations to int8 by tokens, as torchao's converted model.",
    )
    double_quant: bool | None = Field(
        None, description="Of `nf4` and `fp4`: quantise the scales as well. Default true."
    )
    block_size: int | None = Field(
        None,
        description="Of `nf4`, `fp4` and `int4`: how many weights of a row share a scale. Default 64, of `int4` 128. A layer "
        "whose width it does not divide stays as it is, and is named.",
    )
    exclude_modules: str | list[str] | None = Field(
        None,
        description="Layers that stay as they are beside head, embeddings and routers: ends of names, in which `*` stands for "
        "any text; or one regular expression over the whole name.",
    )

    @property
    def library(self) -> str:
        """The backend, chosen where the recipe says nothing."""
        return self.backend or ("torchao" if self.qat else _OF_TYPE[self.type][0])

    @property
    def block(self) -> int | None:
        """How many weights of a row share a scale; None: all of them."""
        return self.block_size or BLOCK.get(self.type)

    @property
    def doubled(self) -> bool:
        """Whether scales are quantised, too."""
        return self.type in ("nf4", "fp4") and self.double_quant is not False

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.qat and (self.type not in ("int4", "int8") or self.library != "torchao"):
            yield "qat", f"is torchao's, of int4 and int8, not of {self.type} by {self.library}; write `type: int4`"
        able = _OF_TYPE[self.type]
        if self.backend is not None and self.backend not in able:
            yield "backend", f"{self.backend} has no {self.type} here; write {able[0]}, or leave it out"
        if self.double_quant is not None and self.type not in ("nf4", "fp4"):
            yield "double_quant", f"belongs to `type: nf4` and `type: fp4`; {self.type} keeps its scales in float32"
        if self.block_size is not None and self.type not in BLOCK:
            yield "block_size", f"has no effect on {self.type}, which has one scale for a row"
        elif self.block_size is not None and self.block_size not in _BLOCKS[self.type]:
            yield "block_size", f"is {', '.join(map(str, _BLOCKS[self.type]))} for {self.type}"
