"""How weights that are held in bfloat16 are rounded: what a recipe says of it, and the optimizer that does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshtune.recipes.recipe import Recipe

# Each element of a parameter by itself, so that they can be stepped on slices.
SLICED = ("adamw", "sgd", "lion")


def rounding(recipe: Recipe) -> Literal["nearest", "stochastic", "kahan"] | None:
    """The rounding of this recipe's weights; None where none that is trained is held in bfloat16."""
    if not _held_in_bfloat16(recipe):
        return None
    return recipe.optimizer.rounding or ("stochastic" if recipe.optimizer.name in SLICED else "nearest")


def problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """Settings of rounding that have no effect, or cannot be."""
    asked, name = recipe.optimizer.rounding, recipe.optimizer.name
    if asked is None:
        return
    if not _held_in_bfloat16(recipe):
        key = "model.dtype" if recipe.peft is None else "peft.dtype"
        yield (
            "optimizer.rounding",
            f"has no effect on weights held in float32; leave it out, or write `{key}: bfloat16`",
        )
    elif asked != "nearest" and name not in SLICED:
        possible = ", ".join(SLICED)
        yield (
            "optimizer.rounding",
            f"{asked} is made for optimizers that treat each element by itself ({possible}), not for {name}; "
            "write `nearest`, or hold the weights in float32",
        )


def notes(recipe: Recipe) -> list[str]:
    """What a run says of it at start."""
    chosen = rounding(recipe)
    if chosen is None:
        return []
    if chosen == "nearest":
        return ["WARNING     weights are held in bfloat16 and rounded to the nearest: updates below that are lost"]
    default = "" if recipe.optimizer.rounding else " (the default for weights held in bfloat16)"
    return [f"rounding    {chosen}{default}"]


def sliced(optimizer: torch.optim.Optimizer, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """`optimizer` over the parameters of the sharded `model`, made to round as `recipe` says, and to keep its moments in the
    memory of the CPU if it says so."""
    chosen, home = rounding(recipe), "cpu" if recipe.training.offload == "optimizer" else None
    if chosen in (None, "nearest") and home is None:
        return optimizer
    from meshtune.models.placing import positions
    from meshtune.optim.slices import Rounding, Sliced

    rounds = None if chosen is None or chosen == "nearest" else Rounding(chosen, recipe.seed, positions(model))
    return Sliced(optimizer, rounds, home)


def _held_in_bfloat16(recipe: Recipe) -> bool:
    return (recipe.model.dtype if recipe.peft is None else recipe.peft.dtype) == "bfloat16"
