"""Forward passes of LoRA and DoRA: PEFT's numbers with fewer temporary tensors, and right where layers are cut over ranks.

They stand in PEFT's own place for other forwards, `lora_variant`, which a unit test pins. This module imports PEFT: import
it only where a model has an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, LoraVariant
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from torch import Tensor, nn

from meshtune.layout import Layout, Plan
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import piece_of
from meshtune.models.adapters.dropout import drop

NAME = "default"
"""PEFT's name of an adapter that was given none."""


@dataclass(frozen=True)
class Place:
    """How the layer of an adapter lies over the ranks of tp.

    Attributes:
        sums: the ranks over which squares of weights add up to those of the whole, where a rank has a part of each output's.
        bias_share: how much of its bias this rank adds.
        stream: which random numbers this rank draws, where what enters is its own: other features, or other tokens.
    """

    sums: Peers | None = None
    bias_share: float = 1.0
    stream: int | None = None


class _Product(LoraVariant):
    """What a merge of PEFT's asks of a forward that adds a product."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


class LoraForward(_Product):
    """`result + scaling * x A^T B^T`."""

    def __init__(self) -> None:
        self.place = Place()

    def forward(  # type: ignore[override]
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        x = drop(_entering(module, active_adapter, x), module.lora_dropout[active_adapter], self.place.stream)
        return _with_product(module, active_adapter, x, result)


class DoraForward(DoraLinearVariant):
    """`m / |W + scaling * B A| * (W + scaling * B A) x + bias`, of which the norm counts as a constant (DoRA, section 4.3).

    As in PEFT, dropout takes inputs away from the adapter and from the change of magnitude, not from W x.
    """

    def __init__(self) -> None:
        self.place = Place()
        self._squares: Tensor | None = None

    def forward(  # type: ignore[override]
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        base = module.get_base_layer()
        x = _entering(module, active_adapter, x)
        dropped = drop(x, module.lora_dropout[active_adapter], self.place.stream)
        again = result if dropped is x else _without_bias(base, dropped)
        whole = _with_product(module, active_adapter, dropped, again)
        scale = (module.lora_magnitude_vector[active_adapter].weight / self.norm(module, active_adapter)).to(
            whole.dtype
        )
        if dropped is not x:
            return torch.addcmul(result - again, whole, scale)
        if base.bias is None:
            return whole * scale
        return torch.addcmul((1 - scale) * (base.bias * self.place.bias_share), whole, scale)

    @torch.no_grad()
    def norm(self, module: Any, name: str) -> Tensor:
        """[out] float32: norms of the rows of W + scaling * B A, from W's own, which never change, and products of rank r."""
        first, second = module.lora_A[name].weight, module.lora_B[name].weight.float()
        base = module.get_base_layer()
        with torch.autocast(first.device.type, enabled=False):
            if self._squares is None:
                self._squares = squares_of(dense_weight(base), 0 if module.fan_in_fan_out else 1)
            crossed, first = _without_bias(base, first).float(), first.float()  # [r, out]: (W A^T)^T
            return _norm(self._squares, crossed, first @ first.T, second, module.scaling[name], self.place.sums)


class EmbeddingForward(_Product):
    """`result + scaling * A[:, ids]^T B^T`; what scales the embedding scales that, too."""

    def forward(  # type: ignore[override]
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        return _with_rows(module, active_adapter, x, result)


class DoraEmbeddingForward(DoraEmbeddingVariant):
    """The same with magnitudes [hidden], each for one feature over the whole vocabulary."""

    def __init__(self) -> None:
        self.place = Place()
        self._squares: Tensor | None = None

    def forward(  # type: ignore[override]
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        magnitude = module.lora_magnitude_vector[active_adapter].weight
        scale = (magnitude / self.norm(module, active_adapter)).to(result.dtype)
        return _with_rows(module, active_adapter, x, result) * scale

    @torch.no_grad()
    def norm(self, module: Any, name: str) -> Tensor:
        """[hidden] float32: norms over the vocabulary of W + scaling * (B A)^T."""
        base = module.get_base_layer()
        first, second = module.lora_embedding_A[name].float(), module.lora_embedding_B[name].float()
        piece = piece_of(base, "weight")
        if piece is not None and first.shape[1] == piece.shape[0]:
            first = torch.cat([first.narrow(1, start, length) for start, length in piece.spans], 1)
        with torch.autocast(first.device.type, enabled=False):
            if self._squares is None:
                self._squares = squares_of(base.weight, 0)
            crossed = first @ base.weight.float()
            return _norm(self._squares, crossed, first @ first.T, second, module.scaling[name], self.place.sums)


def use_own_forwards(model: nn.Module) -> None:
    """Put these forwards on every layer of PEFT's in `model` that has one of two matrices, before it is cut."""
    for _, module in lora_layers(model):
        dora = NAME in module.lora_variant
        if isinstance(module, Linear):
            module.lora_variant[NAME] = DoraForward() if dora else LoraForward()
            module.cast_input_dtype_enabled = False  # the forward does
        elif isinstance(module, Embedding):
            module.lora_variant[NAME] = DoraEmbeddingForward() if dora else EmbeddingForward()


def place_forwards(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Tell these forwards how their layers were cut, by `plan`, over the ranks of tp."""
    if layout.size("tp") == 1:
        return
    peers = layout.peers("tp")
    units = tuple(f"{unit}." for unit in plan.units)
    for path, module in lora_layers(model):
        variant = module.lora_variant.get(NAME)
        if not hasattr(variant, "place"):
            continue
        base, inner = module.get_base_layer(), f"{path}.base_layer"
        piece = piece_of(base, "weight")
        inputs = 0 if isinstance(module, Embedding) or module.fan_in_fan_out else 1
        by_inputs = piece is not None and piece.axis == "tp" and piece.dim == inputs
        in_a_split = piece is not None or f"{inner}.weight" in plan.shared
        own_tokens = layout.sequence_parallel and path.startswith(units) and not in_a_split
        variant.place = Place(
            sums=peers if by_inputs else None,
            bias_share=1 / peers.size if f"{inner}.bias" in plan.divided else 1.0,
            stream=peers.rank if by_inputs or own_tokens else None,
        )


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer of PEFT's LoRA in `model`, by its path."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def dense_weight(base: Any) -> Tensor:
    """A layer's weight as floating-point numbers, whatever it is held in."""
    dense = getattr(base, "dequantized", None)
    return cast(Tensor, base.weight if dense is None else dense())


@torch.no_grad()
def squares_of(weight: Tensor, dim: int) -> Tensor:
    """Float32 sums of squares along `dim` of a matrix, which stays as it is."""
    return torch.linalg.vector_norm(weight, dim=dim, dtype=torch.float32).square()


def _entering(module: Any, name: str, x: Tensor) -> Tensor:
    """What enters, in the dtype of the two matrices, or as it is where autocast chooses."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(module.lora_A[name].weight.dtype)


def _with_product(module: Any, name: str, x: Tensor, result: Tensor) -> Tensor:
    """[..., out]: `result + scaling * x A^T B^T`, in one product for the sum."""
    return _added_product(result, module.lora_A[name](x), module.lora_B[name].weight, module.scaling[name])


def _with_rows(module: Any, name: str, x: Tensor, result: Tensor) -> Tensor:
    hidden = module._embed(x, module.lora_embedding_A[name].T)
    scale = module._get_embed_scale()
    if scale is not None:
        hidden = hidden * scale.to(hidden.dtype)
    return _added_product(result, hidden, module.lora_embedding_B[name], module.scaling[name])


def _added_product(result: Tensor, hidden: Tensor, second: Tensor, scaling: float) -> Tensor:
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(result.dtype)
    flat = result.reshape(-1, result.shape[-1]).to(hidden.dtype)
    total = torch.addmm(flat, hidden.reshape(-1, hidden.shape[-1]), second.T, alpha=scaling)
    return total.view(result.shape)


def _without_bias(base: Any, x: Tensor) -> Tensor:
    """The layer's output less its bias; hooks of the layer, which belong to its one call, do not run."""
    weight = base.weight
    if not weight.is_floating_point():
        output = base.forward(x)
        return output if base.bias is None else output - base.bias
    weight = cast(Tensor, weight)
    if not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
    return F.linear(x, weight) if isinstance(base, nn.Linear) else x @ weight


def _norm(squares: Tensor, crossed: Tensor, gram: Tensor, second: Tensor, scaling: float, sums: Peers | None) -> Tensor:
    """The norm of each row of W + scaling * B A: `squares` [out] of W's rows, `crossed` [r, out] = A W^T, `gram` [r, r] = A A^T,
    `second` [out, r] = B."""
    total = squares + 2 * scaling * (second.T * crossed).sum(0) + scaling**2 * ((second @ gram) * second).sum(1)
    if sums is not None:
        total = sums.all_reduce(total)
    return total.clamp_min(0).sqrt()
