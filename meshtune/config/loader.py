"""The two doors to a recipe: a YAML file, and a Python mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from meshtune.config.builder import Builder
from meshtune.config.files import read_recipe
from meshtune.config.nodes import MapNode, Origin, from_python
from meshtune.config.overrides import apply_overrides, override_name
from meshtune.config.section import Section
from meshtune.errors import Problem, RecipeError

S = TypeVar("S", bound=Section)


def load(cls: type[S], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> S:
    """The recipe in a YAML file, with overrides of the form `section.key=value` laid over it.

    Raises RecipeError with every problem of the file, its bases and the overrides, each
    `file:line: section.key: what was found; what is wanted`.
    """
    if isinstance(overrides, str):
        raise TypeError("overrides is a sequence of strings, not one string")
    file = os.fspath(path)
    problems: list[Problem] = []
    root = read_recipe(file, problems)
    tree, override_problems = apply_overrides(cls, root or MapNode({}, Origin(file)), overrides)
    problems += override_problems
    return _build(cls, tree if root else None, problems, file, overrides)


def from_mapping(cls: type[S], mapping: Mapping[str, Any]) -> S:
    """The recipe in a mapping of Python values (sections may be mappings or Section objects).

    As strict as `load`: a number is a number, not a string that looks like one; an int serves where a float
    is wanted. `${...}` is replaced as in a file. Raises RecipeError with every problem.
    """
    root = from_python(mapping, Origin())
    if not isinstance(root, MapNode):
        raise RecipeError(f"found {type(mapping).__name__}; wanted a mapping of sections")
    return _build(cls, root, [], None)


def _build(
    cls: type[S],
    root: MapNode | None,
    problems: list[Problem],
    file: str | None,
    overrides: Sequence[str] = (),
) -> S:
    section: Any = None
    if root is not None:
        builder = Builder(cls, root)
        section = builder.build()
        problems = problems + builder.problems
    if problems:
        raise RecipeError(_in_reading_order(problems, file, overrides))
    return section


def _in_reading_order(problems: list[Problem], file: str | None, overrides: Sequence[str]) -> list[Problem]:
    """Without repetitions; the recipe first, then its bases, then the overrides; line by line in each."""
    last = [override_name(override) for override in overrides]
    bases = [problem.file for problem in problems if problem.file not in last]
    places = {place: rank for rank, place in enumerate(dict.fromkeys([file, *bases, *last]))}
    return sorted(dict.fromkeys(problems), key=lambda problem: (places[problem.file], problem.line or 0))
