"""`meshtune check`"""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.cli.outcome import exits
from meshtune.cli.train import Overrides, RecipePath


def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(min=1, help="The world size to check the layout for.")] = 1,
) -> None:
    """Validate all that can be known of RECIPE without training, and print it resolved."""
    with exits() as phase:
        phase.recipe = (recipe, overrides or ())
        from meshtune.cli.quiet import quiet
        from meshtune.config import dump, load
        from meshtune.recipes.recipe import Recipe

        loaded = load(Recipe, str(recipe), overrides or ())
        quiet()
        from meshtune.recipes.inspect import inspect

        resolved, lines = inspect(loaded, nproc)
        print(dump(resolved), end="")
        for line in lines:
            print(f"# {line}")
