"""`meshtune schema`"""

from __future__ import annotations

import json

from meshtune.cli.outcome import exits


def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    with exits():
        from meshtune.config import json_schema
        from meshtune.recipes.recipe import Recipe

        print(json.dumps(json_schema(Recipe), indent=2))
