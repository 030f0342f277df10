"""Quantisation-aware training: float weights that the forward sees as the quantised model will.

torchao's linear layers do it: weights in groups, and activations a token at a time, are rounded to integers and back, and
gradients go straight through. Names and weights stay those of the model, so that checkpoints and exports are as ever, and
torchao's own `convert` of an export gives the numbers that training saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshtune.errors import LayoutError
from meshtune.layout import Layout, Plan
from meshtune.models.quantization.section import QuantizationSection

if TYPE_CHECKING:
    from torchao.quantization.qat.linear import FakeQuantizedLinear
    from transformers import PreTrainedModel

__all__ = ["base_config", "check_cuts", "fake_quantise", "over_ranks"]


def base_config(section: QuantizationSection) -> Any:
    """torchao's config of the quantised model: what `quantize_` is given after training, or `QATConfig(..., step="convert")`."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4 if section.type == "int4" else torch.int8,  # type: ignore[attr-defined]
        weight_granularity=PerAxis(0) if section.block is None else PerGroup(section.block),
    )


def fake_quantise(model: PreTrainedModel, layers: tuple[str, ...], section: QuantizationSection) -> None:
    """Put a layer that rounds its weight and its input in the place of each of `layers`. On meta; nothing is read."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    chosen = frozenset(layers)
    quantize_(
        model,
        QATConfig(base_config(section), step="prepare"),
        filter_fn=lambda module, name: name in chosen,
    )


def check_cuts(plan: Plan, layers: tuple[str, ...], section: QuantizationSection, layout: Layout) -> None:
    """Raises LayoutError naming a layer of which tensor parallelism would cut a group."""
    group = section.block or 1
    for path in layers:
        cut = plan.cuts.get(f"{path}.weight")
        if cut is None or cut.dim % 2 == 0:
            continue
        spans = [span for rank in range(layout.size(cut.axis)) for span in cut.spans(layout.size(cut.axis), rank)]
        if any(start % group or length % group for start, length in spans):
            width, size = sum(cut.blocks), layout.size(cut.axis)
            smaller = [n for n in (128, 64, 32) if n < group and width % (size * n) == 0]
            way = f"write quantization.block_size: {smaller[0]}, " if smaller else ""
            raise LayoutError(
                f"distributed.tp_size: {path} has {width} columns, which {size} ranks would not cut between groups of {group}; "
                f"{way}another tp_size, or name it in quantization.exclude_modules"
            )


def over_ranks(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Of layers whose columns tensor parallelism cuts, let the ranges of activations and of rows be those of all ranks."""
    for path, layer in _fake_quantised(model):
        cut = plan.cuts.get(f"{path}.weight")
        if cut is not None and cut.dim % 2 == 1 and layout.size(cut.axis) > 1:
            from meshtune.models.quantization.ranges import OverRanks

            peers = layout.peers(cut.axis)
            layer.activation_fake_quantizer = OverRanks(layer.activation_fake_quantizer, peers)
            layer.weight_fake_quantizer = OverRanks(layer.weight_fake_quantizer, peers)


def _fake_quantised(model: nn.Module) -> Iterator[tuple[str, FakeQuantizedLinear]]:
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    for path, module in model.named_modules():
        if isinstance(module, FakeQuantizedLinear):
            yield path, module
