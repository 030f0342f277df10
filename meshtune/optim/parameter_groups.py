"""Which parameters are trained, how fast, and which of them decay."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshtune.errors import ModelError
from meshtune.optim.groups import Rule

__all__ = ["parameter_groups"]


def parameter_groups(
    named_modules: Iterable[tuple[str, nn.Module]],
    weight_decay: float,
    rules: Mapping[str, Rule] | None = None,
    others: bool = False,
    parts: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: each trainable parameter once, in the order of the modules.

    No decay on biases and normalisation weights, which means: a name that ends in "bias" or contains "norm", or any
    parameter of a module whose class name contains "norm", as transformers' Trainer decides. A tied parameter counts
    once, under its first module. DTensors of each mesh stand in groups of their own, because a fused kernel takes no
    mixture.

    Args:
        named_modules: `model.named_modules()`, or those of several parts of a model one after another.
        weight_decay: for the parameters that decay.
        rules: of some parameters, by name, see `meshtune.optim.groups.assign`.
        parts: which of several optimizers a parameter is for, by name; it stands in the group as `part`.
        others: whether other ranks may have trainable parameters where this one has none.

    Returns:
        Dictionaries with `params`, `names` (one a parameter), `weight_decay` and `lr_scale`, of which TrainStep takes the
        learning rate's part; none of them empty, but for the only one of a rank that trains nothing.

    Raises:
        ModelError: no parameter is trainable.
    """
    groups: dict[Hashable, dict[str, Any]] = {}
    seen: set[int] = set()
    for path, module in named_modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}" if path else name
            rule = (rules or {}).get(full)
            decay = weight_decay if _decays(module, name) else 0.0
            if rule is not None and rule.weight_decay is not None:
                decay = rule.weight_decay
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            part = (parts or {}).get(full)
            group = groups.setdefault((rule, decay, mesh, part), _group(decay, rule, part))
            group["params"].append(parameter)
            group["names"].append(full)
    if not groups and not others:
        raise ModelError(
            "the model has no trainable parameter: every one is frozen (requires_grad is False); "
            "leave at least one unfrozen"
        )
    return list(groups.values()) or [_group(weight_decay, None, None)]


def _group(decay: float, rule: Rule | None, part: str | None) -> dict[str, Any]:
    group = {"params": [], "names": [], "weight_decay": decay, "lr_scale": 1.0 if rule is None else rule.lr_scale}
    return group if part is None else {**group, "part": part}


def _decays(module: nn.Module, name: str) -> bool:
    is_normalisation = "norm" in type(module).__name__.lower() or "norm" in name.lower()
    return not is_normalisation and not name.endswith("bias")
