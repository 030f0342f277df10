"""Rows of a plan for modules that are trained whole beside an adapter: PEFT leaves the module where it was and trains a copy,
which is cut as the module is, and runs in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from meshtune.errors import ModelError
from meshtune.layout import Plan
from meshtune.models.adapters.view import inner_paths

V = TypeVar("V")
_ORIGINAL, _COPY = "original_module", "modules_to_save.default"


def with_copies(plan: Plan, model: nn.Module) -> Plan:
    """The plan of a bare model with rows for the copies in `model`, which has the adapter.

    Rows of the module itself keep the bare name of the module; those of modules inside have the names that these have now. Raises
    ModelError for a module that cannot be trained so.
    """
    saved = [path for path, inner in inner_paths(model).items() if inner == f"{path}.{_ORIGINAL}"]
    if not saved:
        return plan
    for path in saved:
        _check(path, plan)

    def modules(path: str) -> list[str]:
        """The module that was at `path` and its copy, where they are now."""
        if path in saved:
            return [path, f"{path}.{_COPY}"]
        outer = next((outer for outer in saved if path.startswith(f"{outer}.")), None)
        return [path] if outer is None else [path.replace(outer, f"{outer}.{place}", 1) for place in (_ORIGINAL, _COPY)]

    def parameters(name: str) -> list[str]:
        path, _, leaf = name.rpartition(".")
        return [f"{module}.{leaf}" for module in modules(path)]

    def run(path: str) -> str:
        """The module that runs in the place of that at `path`: around the copy itself stands PEFT's wrapper."""
        return path if path in saved else modules(path)[-1]

    return replace(
        plan,
        splits=tuple(
            replace(split, entries=tuple(map(run, split.entries)), exits=tuple(map(run, split.exits)))
            for split in plan.splits
        ),
        cuts=_spread(plan.cuts, parameters),
        shared=frozenset(_all(plan.shared, parameters)),
        divided=frozenset(_all(plan.divided, parameters)),
        gathered=frozenset(map(run, plan.gathered)),
        selected={run(path): groups for path, groups in plan.selected.items()},
        attributes=_spread(plan.attributes, modules),
        head_inputs={run(path): heads for path, heads in plan.head_inputs.items()},
        vocabulary=tuple(_all(plan.vocabulary, modules)),
        whole=tuple(map(run, plan.whole)),
        idle=tuple(f"{path}.{_ORIGINAL}" for path in saved),
    )


def _check(path: str, plan: Plan) -> None:
    inside = [unit for unit in plan.units if f"{unit}.".startswith(f"{path}.")]
    if inside:
        raise ModelError(
            f"peft.modules_to_save: {path} is, or holds, a whole block of the model ({inside[0]}); name modules inside of "
            "blocks or outside of them, or train it by model.trainable, without peft"
        )
    for experts in plan.experts:
        if f"{experts.path}.".startswith(f"{path}."):
            raise ModelError(
                f"peft.modules_to_save: {path} holds experts, which are shared out over ranks; give them adapters by "
                "peft.target_parameters, or train them by model.trainable, without peft"
            )


def _all(names: Iterable[str], held: Callable[[str], list[str]]) -> Iterable[str]:
    return (other for name in names for other in held(name))


def _spread(rows: Mapping[str, V], held: Callable[[str], list[str]]) -> dict[str, V]:
    return {other: row for name, row in rows.items() for other in held(name)}
