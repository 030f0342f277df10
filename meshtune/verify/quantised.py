"""The quantised weights of a user's recipe for the small model: layers of the same kinds, by the same library, as int8.

Blocks that share a scale are wider than a small model's layers. int8 has a scale for each row instead, so that any width can be
cut; what the whole model's blocks do not allow is asked of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from meshtune.errors import LayoutError, MeshtuneError, RecipeError
from meshtune.layout import Layout
from meshtune.models import hf
from meshtune.models.blocks import generic
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, resolve
from meshtune.recipes import adapting, quantizing
from meshtune.recipes.plans import find_plan
from meshtune.verify.layouts import Trial

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe


def made_small(recipe: Recipe, source: Source, folder: str) -> QuantizationSection | None:
    """`quantization:` for the small model in `folder`, from that of `recipe` for the model of `source`; None without, or
    with `qat`, whose rounding makes a jump of the difference between two sums.

    Raises RecipeError if none of the layers is of a kind that the small model has.
    """
    chosen = quantizing.choose(recipe, source, adapting.choose(recipe, source))
    if chosen is None or recipe.quantization is None or recipe.quantization.qat:
        return None
    kinds = set(map(generic, chosen.layers))
    small = hf.build(resolve(ModelSection(name=folder)), "eager")
    there = {generic(path) for path, module in small.named_modules() if type(module) is nn.Linear}
    if not kinds & there:
        raise RecipeError("quantization: has no layer of a kind that the model made small has; verify it without it")
    others = "|".join(re.escape(kind).replace(r"\*", r"\d+") for kind in sorted(there - kinds))
    changes = {"type": "int8", "backend": recipe.quantization.library, "double_quant": None, "block_size": None}
    return recipe.quantization.model_copy(update={**changes, "exclude_modules": others or None})


def refusals(recipe: Recipe, source: Source, trials: Sequence[Trial]) -> dict[str, str]:
    """Of layouts that would cut quantised layers of the whole model inside a block: why, as training would say it."""
    found: dict[str, str] = {}
    if recipe.quantization is None:
        return found
    adapter = adapting.choose(recipe, source)
    for trial in trials:
        try:
            layout = Layout.resolve(trial.section, trial.ranks)
            plan = find_plan(source, layout, trial.section.plan)
        except MeshtuneError:
            continue  # what else is wrong with a layout is found when it is tried
        try:
            quantizing.choose(recipe, source, adapter, layout, plan)
        except LayoutError as error:
            found[trial.name] = str(error)
    return found
