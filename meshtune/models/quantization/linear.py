"""A frozen linear layer whose weight is held in few bits.

It is an nn.Linear by isinstance, so that PEFT puts an adapter on it as on any; its tensors are plain frozen integers in which
rows of the weight stay rows, so that whatever shares out tensors (FSDP2, tensor parallelism, pipelines, checkpoints) treats
them as any other. Numbers in float32 that go with them (scales) are held as their bits in int32: mixed precision leaves integers
alone, and would round floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshtune.layout.pieces import piece_of

Held = Mapping[str, Tensor]
"""What holds one weight, by the names of the layer's parameters."""


@dataclass(frozen=True)
class Form:
    """One of the tensors that hold a weight [out, in].

    Attributes:
        dtype: as it is stored.
        every: how many weights of a row one element stands for; None: it has one element a row ([out]), or is not by rows.
        rows: False for what belongs to the weight as a whole and is not cut with it.
        weights_each: of what is not by rows, how many weights one element stands for; 0: a single element for all.
    """

    dtype: torch.dtype
    every: int | None = None
    rows: bool = True
    weights_each: int = 0

    def shape(self, out: int, width: int) -> tuple[int, ...]:
        """Of a weight [out, width]."""
        if not self.rows:
            return (-(-out * width // self.weights_each) if self.weights_each else 1,)
        return (out,) if self.every is None else (out, width // self.every)


class Codec(Protocol):
    """How a library holds a weight."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def block(self) -> int | None:
        """How many weights of a row go together; None where any number can be cut off."""
        ...

    @property
    def forms(self) -> Mapping[str, Form]:
        """The tensors in their order: `weight`, with `every`, first."""
        ...

    def quantise(self, whole: Tensor) -> dict[str, Tensor]:
        """What holds the whole float `whole` [out, in], on the same device."""
        ...

    def dense(self, held: Held, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
        """The weight [out, in] in `dtype`, or the part of it that `held` holds. Of a part, `places` [out, in / block] (int64) is
        where each of its blocks lies in the flat weight, counted in blocks."""
        ...


class QuantizedLinear(nn.Linear):
    """x @ weight.T + bias with a frozen weight [out, in] in the form of `codec`, made dense in the dtype of x for each use."""

    def __init__(self, like: nn.Linear, codec: Codec):
        """In the place of `like`, which is on meta. Its tensors are on meta, its bias is that of `like`."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.codec, self.source_dtype = codec, like.weight.dtype
        for name, form in codec.forms.items():
            shape = form.shape(like.out_features, like.in_features)
            empty = torch.empty(shape, dtype=form.dtype, device=like.weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", like.bias)
        self.train(like.training)

    @property
    def dense_numel(self) -> int:
        """How many weights the whole layer stands for; of a pipeline's stages it counts as so many."""
        return self.out_features * self.in_features

    @property
    def held(self) -> dict[str, Tensor]:
        """What holds the weight (this rank's part, as it is now)."""
        return {name: getattr(self, name) for name in self.codec.forms}

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as it is computed with, or this rank's part of it."""
        return self.codec.dense(self.held, dtype, self._places())

    def dequantized(self) -> Tensor:
        """The weight in float32, or this rank's part of it."""
        return self.dense(torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype of `input`, or of autocast where that is on."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(input.to(dtype), bias, self.codec, self._places(), *self.held.values())
        return product

    def _places(self) -> Tensor | None:
        """Where the blocks of a part that tensor parallelism has cut lie in the whole; None of a whole weight."""
        piece = piece_of(self, "weight")
        if piece is None or self.codec.block is None:
            return None
        block, every = self.codec.block, self.codec.forms["weight"].every or 1
        rows, columns = piece.shape[0], piece.shape[1] * every // block
        whole = torch.arange(rows * columns, device=self.weight.device).view(rows, columns)
        share = block // every if piece.dim == 1 else 1
        return torch.cat([whole.narrow(piece.dim, start // share, n // share) for start, n in piece.spans], piece.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.codec.name}"


class _Product(torch.autograd.Function):
    """x @ W.T + bias. W is made dense in the forward, let go, and made again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codec: Codec, places: Tensor | None, *held: Tensor) -> Tensor:
        ctx.codec, ctx.places = codec, places
        ctx.save_for_backward(*held)
        return nn.functional.linear(x, _dense(codec, held, x.dtype, places), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        held = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        x = gradient @ _dense(ctx.codec, held, gradient.dtype, ctx.places) if needs_x else None
        bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return (x, bias, None, None, *(None for _ in held))


def _dense(codec: Codec, held: tuple[Tensor, ...], dtype: torch.dtype, places: Tensor | None) -> Tensor:
    weight = held[0]
    if weight.is_meta:
        width = weight.shape[1] * (codec.forms["weight"].every or 1)
        return torch.empty((weight.shape[0], width), dtype=dtype, device="meta")
    return codec.dense(dict(zip(codec.forms, held, strict=True)), dtype, places)


def bits(tensor: Tensor) -> Tensor:
    """float32 numbers as int32 of the same bits."""
    return tensor.float().contiguous().view(torch.int32)


def number(tensor: Tensor) -> Tensor:
    """The float32 numbers of such bits."""
    return tensor.contiguous().view(torch.float32)
