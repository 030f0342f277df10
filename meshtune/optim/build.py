"""The optimizer of a section over the parameters of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.optim.composite import Composite
from meshtune.optim.groups import Rule
from meshtune.optim.methods import METHODS, Method, adamw
from meshtune.optim.parameter_groups import parameter_groups
from meshtune.optim.rounding import Position
from meshtune.optim.whole import WholeTensors, local_part

if TYPE_CHECKING:
    from meshtune.optim.section import OptimizerSection

__all__ = ["Known", "build"]


@dataclass(frozen=True)
class Known:
    """What is known of the whole model beyond the modules of one rank.

    Attributes:
        rules: of parameters in groups, by name.
        parts: of an optimizer that is two, which of them a trained parameter is for, by name.
        positions: what of each parameter this rank holds; left out, that is all of it.
        others: whether other ranks may train parameters where this one has none.
        local: what of a tensor this rank has, without what a library lays around it to have it gathered in float8: the library's
            optimizers end the process if a weight is that.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    positions: Mapping[nn.Parameter, Position] = field(default_factory=dict)
    others: bool = False
    local: Callable[[Tensor], Tensor] = local_part


def build(
    section: OptimizerSection,
    named_modules: Iterable[tuple[str, nn.Module]],
    learning_rate: float,
    known: Known | None = None,
) -> torch.optim.Optimizer:
    """Works on plain tensors, parts of them and DTensors, in any mixture; every rank must call it.

    Raises ModelError if no parameter is trainable, or the optimizer needs more to be `known` than it is.
    """
    method = METHODS[section.name]
    if method.scope is not None and known is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ModelError(
            f"{section.name} updates whole tensors, and has to know which part of each a rank holds: "
            "build(..., known=Known(positions=meshtune.models.placing.positions(model)))"
        )
    known = known or Known()
    if section.name == "muon" and not known.parts:
        raise ModelError("muon is for hidden matrices: build(..., known=Known(parts=...)) has to say which these are")
    modules = list(named_modules)
    groups = parameter_groups(modules, section.weight_decay, known.rules, known.others, known.parts)
    if method.scope is None:
        return method.make(section, groups, learning_rate)
    device = next((p.device for _, module in modules for p in module.parameters()), torch.device("cpu"))
    if section.name != "muon":
        return _whole(section, method, groups, learning_rate, known, device)
    matrices = [group for group in groups if group.get("part") == "muon"]
    rest = [group for group in groups if group.get("part") != "muon"]
    parts = [_whole(section, method, matrices, learning_rate, known, device)]
    return Composite([*parts, adamw(section, rest, learning_rate)] if rest else parts)


def _whole(
    section: OptimizerSection,
    method: Method,
    groups: Sequence[dict[str, Any]],
    learning_rate: float,
    known: Known,
    device: torch.device,
) -> WholeTensors:
    positions = {p: known.positions.get(p) or _alone(name, p) for name, p in _named(groups)}
    make = partial(_make, section, method, learning_rate)
    return WholeTensors(groups, learning_rate, make, method.scope or "tensors", positions, device, method, known.local)


def _make(
    section: OptimizerSection, method: Method, learning_rate: float, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    return method.make(section, groups, learning_rate)


def _named(groups: Sequence[dict[str, Any]]) -> list[tuple[str, nn.Parameter]]:
    return [pair for group in groups for pair in zip(group["names"], group["params"], strict=True)]


@dataclass(frozen=True)
class _Everything:
    """The box of a whole tensor."""

    shape: tuple[int, ...]

    @property
    def start(self) -> tuple[int, ...]:
        return (0,) * len(self.shape)

    local = start


def _alone(name: str, parameter: nn.Parameter) -> Position:
    shape = tuple(parameter.shape)
    return Position(name, shape, [_Everything(shape)])
