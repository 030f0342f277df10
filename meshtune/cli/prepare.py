"""`meshtune prepare`"""

from __future__ import annotations

from meshtune.cli.outcome import exits
from meshtune.cli.train import Overrides, RecipePath


def prepare(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Read and tokenise RECIPE's data ahead of training, on this machine's cores, and say what became of the rows."""
    with exits() as phase:
        phase.recipe = (recipe, overrides or ())
        from meshtune.cli.quiet import quiet
        from meshtune.config import load
        from meshtune.recipes.recipe import Recipe

        loaded = load(Recipe, str(recipe), overrides or ())
        quiet()
        from meshtune.recipes.preparing import prepared

        for line in prepared(loaded):
            print(line)
