"""Recipes: typed, strict, frozen sections, read from YAML or Python with every problem named at once."""

from meshtune.config.dump import dump, recipe_hash
from meshtune.config.loader import from_mapping, load
from meshtune.config.places import with_places
from meshtune.config.reference import reference, starter
from meshtune.config.schema import json_schema
from meshtune.config.section import Section
from meshtune.errors import Problem

__all__ = [
    "Problem",
    "Section",
    "dump",
    "from_mapping",
    "json_schema",
    "load",
    "recipe_hash",
    "reference",
    "starter",
    "with_places",
]
