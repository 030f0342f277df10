"""transformers' tables of tensor-parallel styles, and the recipe's own, as roles of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from meshtune.errors import LayoutError
from meshtune.models.blocks import generic

Role = Literal["column", "row", "replicate"]

# Styles that place a layer before or behind the point where ranks differ. Others (`moe_tp_experts`,
# `replicated_with_grad_allreduce`, `mla_kv_a_proj`) say how gradients or outputs are summed: here that follows from a split.
_ROLES: dict[str, Role] = {
    "colwise": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "column",  # experts that are stored transposed: their output features are columns of the stored tensor
    "replicate": "replicate",
}


def table_roles(model: PreTrainedModel) -> dict[str, Role]:
    """Qualified name of a module or parameter to its role in the tables of the model's config."""
    names, found = _names(model), {}
    for pattern, style in (getattr(model, "_tp_plan", None) or {}).items():
        if style in _ROLES:
            found.update(dict.fromkeys(matching(pattern, names), _ROLES[style]))
    return found


def asked_roles(model: PreTrainedModel, asked: Mapping[str, str] | None) -> dict[str, Role]:
    """The same for the recipe's own `distributed.plan`. Raises LayoutError naming a pattern that matches nothing."""
    names, found = _names(model), {}
    for pattern, style in (asked or {}).items():
        matched = matching(pattern, names)
        if not matched:
            raise LayoutError(
                f"distributed.plan: {pattern!r} names no module of {type(model).__name__}; {_nearest(pattern, model)}"
            )
        found.update(dict.fromkeys(matched, _ROLES[style]))
    return found


def _names(model: PreTrainedModel) -> list[str]:
    return [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]


def matching(pattern: str, names: list[str]) -> list[str]:
    """Those of `names` that a pattern means, where `*` stands for any one part between dots."""
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    return [name for name in names if expression.fullmatch(name)]


def _nearest(pattern: str, model: nn.Module) -> str:
    from meshtune.config.suggest import nearest

    if re.search(r"\.\d+\.", pattern):
        return "write * in the place of a layer's number: layers of one kind are cut alike"
    kinds = sorted({generic(name) for name, _ in model.named_modules() if name})
    close = nearest(pattern, kinds)
    return f"did you mean {close!r}?" if close else f"its modules are {', '.join(kinds[:12])}, ..."
