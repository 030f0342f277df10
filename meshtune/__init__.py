"""meshtune: train any Hugging Face language model on any mesh from one recipe, with the same numbers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshtune.recipes.door import AutoModelForCausalLM, train
    from meshtune.recipes.recipe import Recipe

__all__ = ["AutoModelForCausalLM", "Recipe", "__version__", "train"]

_WHERE = {
    "AutoModelForCausalLM": "meshtune.recipes.door",
    "train": "meshtune.recipes.door",
    "Recipe": "meshtune.recipes.recipe",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only for what needs them."""
    if name not in _WHERE:
        raise AttributeError(f"module 'meshtune' has no attribute {name!r}")
    from meshtune.observe.chatter import hush

    hush()
    return getattr(import_module(_WHERE[name]), name)
