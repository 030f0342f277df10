"""Which parameters are trained, and which of them decay."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshtune.errors import ModelError

__all__ = ["parameter_groups"]


def parameter_groups(named_modules: Iterable[tuple[str, nn.Module]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: each trainable parameter once, in the order of the modules.

    No decay on biases and normalisation weights, which means: a name that ends in "bias" or contains "norm", or any
    parameter of a module whose class name contains "norm", as transformers' Trainer decides. A tied parameter counts
    once, under its first module. DTensors of each mesh stand in groups of their own, because a fused kernel takes no
    mixture.

    Args:
        named_modules: `model.named_modules()`, or those of several parts of a model one after another.
        weight_decay: for the parameters that decay.

    Returns:
        Dictionaries with `params` and `weight_decay`, none of them empty.

    Raises:
        ModelError: no parameter is trainable.
    """
    groups: dict[Hashable, dict[str, Any]] = {}
    seen: set[int] = set()
    for _, module in named_modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            decay = weight_decay if _decays(module, name) else 0.0
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            group = groups.setdefault((decay, mesh), {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
    if not groups:
        raise ModelError(
            "the model has no trainable parameter: every one is frozen (requires_grad is False); "
            "leave at least one unfrozen"
        )
    return list(groups.values())


def _decays(module: nn.Module, name: str) -> bool:
    is_normalisation = "norm" in type(module).__name__.lower() or "norm" in name.lower()
    return not is_normalisation and not name.endswith("bias")
