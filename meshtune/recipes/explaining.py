"""What `meshtune explain` tells: the mesh of a recipe and where every parameter of its model lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meshtune.layout import Layout
from meshtune.layout.explain import Placed, drawing, placed
from meshtune.models import hf
from meshtune.models.source import resolve
from meshtune.recipes.plans import declare, find_plan
from meshtune.recipes.recipe import Recipe


@dataclass(frozen=True)
class Explained:
    """A layout and the parameters of a model on it."""

    layout: Layout
    parameters: list[Placed]
    notes: list[str]

    def lines(self) -> list[str]:
        """For people: parameters that differ only in the number of their layer share a line."""
        lines = [*drawing(self.layout), "", *self.notes]
        alike: dict[tuple[Any, ...], list[Placed]] = {}
        for found in self.parameters:
            key = (re.sub(r"\.\d+\.", ".*.", found.name), found.shape, str(found.placement), found.local_shape)
            alike.setdefault(key, []).append(found)
        for (pattern, *_), members in alike.items():
            first = members[0]
            name = f"{pattern} ({len(members)})" if len(members) > 1 else first.name
            where = ", ".join(f"{axis}: {how}" for axis, how in first.placement.items()) or "whole on every rank"
            lines.append(f"{name}  {_shape(first.shape)}")
            lines.append(
                f"    {where}; local {_shape(first.local_shape)}, {first.bytes:,} bytes; gradient: {first.reduction}"
            )
        total = sum(found.bytes for found in self.parameters)
        return [*lines, "", f"weights on the rank that holds most: at most {total:,} bytes"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.describe(),
            "notes": self.notes,
            "parameters": [found.as_dict() for found in self.parameters],
        }


def explained(recipe: Recipe, world_size: int) -> Explained:
    """Lay the recipe's model out on `world_size` ranks, from its config alone."""
    layout = Layout.resolve(recipe.distributed, world_size)
    source = resolve(recipe.model.model_copy(update={"weights": "random"}))
    layout.check(source.facts())
    found = find_plan(source, layout, recipe.distributed.plan)
    model = hf.build(source, "eager")
    plan = declare(model, found, layout)
    sizes = [(name, tuple(p.shape), p.element_size()) for name, p in model.named_parameters()]
    return Explained(layout, list(placed(layout, plan, sizes)), found.notes() if found else [])


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
