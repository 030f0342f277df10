"""Patterns by which a recipe names modules and parameters of a model.

A list holds ends of names, cut at dots: `q_proj` is every `...q_proj`, `layers.0` every `...layers.0`, never `layers.10`.
`*`, `?` and `[0-3]` are the shell's wildcards; `*` also stands for dots. A text in the place of a list is one regular
expression over the whole name. This is how PEFT reads `target_modules`, with wildcards beside.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache

__all__ = ["Patterns", "as_written", "covers", "matches", "misspelt", "nearest_names", "unreadable", "without_effect"]

Patterns = str | Sequence[str]


def matches(patterns: Patterns, name: str) -> bool:
    """Whether `patterns` name the module or parameter called `name`."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(_end(pattern).fullmatch(name) for pattern in patterns)


def covers(patterns: Patterns, parameter: str) -> bool:
    """Whether `patterns` name the parameter called `parameter`, or, in a list, a module that it is in.

    A regular expression is over the parameter's whole name.
    """
    if isinstance(patterns, str):
        return matches(patterns, parameter)
    return any(matches(patterns, path) for path in _paths(parameter))


def unreadable(patterns: Patterns) -> str | None:
    """What is wrong with patterns whatever the model, as a message; None if nothing is."""
    if not patterns:
        return "found nothing; name something, or leave the key out"
    if not isinstance(patterns, str):
        return None if all(patterns) else "found an empty pattern; remove it"
    try:
        re.compile(patterns)
    except re.error as error:
        return f"{patterns!r} is no regular expression: {error}; ends of names are written as a list, [{patterns}]"
    return None


def without_effect(patterns: Patterns, parameters: Iterable[str]) -> list[str]:
    """Those of `patterns` that cover none of the parameters called `parameters`."""
    each: list[Patterns] = [patterns] if isinstance(patterns, str) else [[pattern] for pattern in patterns]
    names = list(parameters)
    return [as_written(pattern) for pattern in each if not any(covers(pattern, name) for name in names)]


def as_written(patterns: Patterns) -> str:
    """Patterns in a message."""
    return patterns if isinstance(patterns, str) else ", ".join(patterns)


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """What ends of `names` the pattern resembles most, layers' numbers written as `*`."""
    ends = dict.fromkeys(end for name in names for end in _ends(name))
    return difflib.get_close_matches(pattern.removesuffix(".*"), list(ends), n=count, cutoff=0.5)


def misspelt(patterns: Patterns, parameters: Iterable[str], of: str = "of the model") -> Iterator[str]:
    """A message for each of `patterns` that covers none of the parameters `of`..., with what it may have been meant to be."""
    names = list(parameters)
    for pattern in without_effect(patterns, names):
        if isinstance(patterns, str) and any(covers([patterns], name) for name in names):
            yield f"the regular expression {pattern!r} matches no whole name {of}; ends of names are a list: [{pattern}]"
            continue
        near = nearest_names(pattern, names)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_examples(names))}"
        yield f"{pattern!r} matches no parameter {of}; {hint}"


def _examples(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(".".join(_numbered(name)) for name in names))[:20]


def _ends(name: str) -> Iterator[str]:
    for path in _paths(name):
        parts = _numbered(path)
        yield from (".".join(parts[start:]) for start in range(len(parts)) if parts[start] != "*")


def _numbered(name: str) -> list[str]:
    return ["*" if part.isdigit() else part for part in name.split(".")]


def _paths(name: str) -> Iterator[str]:
    """The name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@lru_cache(maxsize=4096)
def _end(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*\.)?{translate(pattern)}")
