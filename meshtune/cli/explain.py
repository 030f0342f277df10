"""`meshtune explain`"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshtune.cli.outcome import exits
from meshtune.cli.train import Overrides, RecipePath


def explain(
    recipe: RecipePath,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, help="The number of ranks to lay the model out on.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print where every parameter of RECIPE's model lies on its mesh, and draw the mesh. No weight is read."""
    with exits() as phase:
        phase.recipe = (recipe, overrides or ())
        from meshtune.cli.quiet import quiet
        from meshtune.config import load
        from meshtune.recipes.recipe import Recipe

        loaded = load(Recipe, str(recipe), overrides or ())
        quiet()
        from meshtune.recipes.explaining import explained

        found = explained(loaded, world)
        print(json.dumps(found.as_dict(), indent=2) if as_json else "\n".join(found.lines()))
