"""The repeated blocks (decoder layers) of a model."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_ATTRIBUTE = "_meshtune_units"


def remember_units(model: PreTrainedModel) -> None:
    """Keep the names of the blocks, which a pipeline stage no longer has all."""
    model.__dict__[_ATTRIBUTE] = unit_names(model)


def unit_names(model: PreTrainedModel) -> list[str]:
    """Qualified names of the repeated blocks, in the order in which they are defined."""
    if (known := model.__dict__.get(_ATTRIBUTE)) is not None:
        return list(known)
    blocks = set(model._no_split_modules or ())
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        children = list(module)
        if children and all(_is_block(child, blocks) for child in children):
            found += [f"{name}.{index}" for index in range(len(children))]
    return found


def generic(name: str) -> str:
    """A qualified name with its numbers written as `*`: the same for all layers of a kind."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _is_block(module: nn.Module, names: set[str]) -> bool:
    return type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer)
