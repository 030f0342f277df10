"""Where a run keeps less on its device: what a recipe asks for, and whether it can be had."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshtune.errors import Problem, RecipeError

if TYPE_CHECKING:
    from meshtune.layout import Layout
    from meshtune.recipes.recipe import Recipe


def check(recipe: Recipe, layout: Layout, device_type: str) -> None:
    """Raises RecipeError naming what has no effect on this machine or layout, or cannot be done there."""
    if found := [Problem(key, message) for key, message in (*_on_device(recipe, device_type),)]:
        raise RecipeError(found)


def settings(recipe: Recipe) -> dict[str, Any]:
    """What `meshtune.parallel.Settings` is told."""
    training = recipe.training
    asked: dict[str, Any] = {
        "checkpoint_every": training.activation_checkpointing_every,
        "checkpoint_keep": training.activation_checkpointing_keep,
        "activation_offload": training.activation_offload,
    }
    return {key: value for key, value in asked.items() if value is not None}


def _on_device(recipe: Recipe, device_type: str) -> Iterable[tuple[str, str]]:
    if device_type != "cpu":
        return
    why = "moves to the memory of the CPU what is there already: this machine has no accelerator; leave it out"
    if recipe.training.activation_offload:
        yield "training.activation_offload", why
