"""What `meshtune explain` tells: the mesh of a recipe and where every parameter of its model lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from meshtune.layout import Layout, Plan
from meshtune.layout.explain import Placed, drawing, placed
from meshtune.models import hf
from meshtune.models.causal_lm import CausalLM
from meshtune.models.source import resolve
from meshtune.parallel.stage_trial import pipeline_ranks
from meshtune.parallel.stages import cut
from meshtune.recipes import adapting, precision, quantizing
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
            pattern = re.sub(r"\.\d+\.", ".*.", found.name)
            key = (pattern, found.shape, str(found.placement), found.local_shape, found.reduction)
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
    source = resolve(recipe.model.model_copy(update={"weights": "random"}), recipe.quantization)
    source = adapting.held(source, recipe, torch.float32)
    layout.check(source.facts())
    found = find_plan(source, layout, recipe.distributed.plan)
    adapter = adapting.choose(recipe, source)
    quantised = quantizing.choose(recipe, source, adapter, layout, found)
    model = hf.build(source, "eager")
    plan = quantizing.put(model, recipe, declare(model, found, layout), layout, adapter, quantised)
    float8 = precision.chosen(recipe, torch.device("cpu"), model, plan, layout)
    sizes = [(name, tuple(p.shape), p.element_size()) for name, p in model.named_parameters()]
    learning = adapting.trained(model, recipe.model)
    holders = stage_holders(model, plan, layout, recipe.distributed.pp_schedule or "1f1b")

    def stage_of(name: str) -> str:
        return "rank " + " and ".join(map(str, holders[name])) + (", tied" if len(holders[name]) > 1 else "")

    def trained(name: str) -> bool:
        return learning is None or name in learning.names

    notes = [*(found.notes() if found else []), *(adapter.lines() if adapter is not None else [])]
    notes += quantised.lines if quantised is not None else ()
    notes += [f"fp8: {float8.summary()}"] if float8 is not None else ()
    return Explained(layout, list(placed(layout, plan, sizes, stage_of, trained)), notes)


def stage_holders(model: PreTrainedModel, plan: Plan, layout: Layout, schedule: str) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter of a whole meta model, which is used up. Empty without a pipeline.

    Raises LayoutError if there are too few layers.
    """
    if layout.size("pp") == 1:
        return {}
    first = pipeline_ranks(layout.size("pp"))[0]
    root, blocks = CausalLM(model), plan.units
    placement = cut(root, model, blocks, first, schedule, joined=plan.joined_units, wrapped=plan.wrapped).placement
    found: dict[str, set[int]] = {}
    for name, holders in placement.holders.items():
        found.setdefault(placement.canonical[name], set()).update(holders)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
