"""What pydantic refuses, in the words of the other problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from meshtune.config.annotations import show
from meshtune.config.nodes import Node, Scalar
from meshtune.config.scalars import found

_SHOULD = re.compile(r"[A-Z]\w+ should (\w+) (.*?)(?: after validation, not \d+)?")


def field_errors(error: ValidationError) -> Iterator[tuple[tuple[str | int, ...], str, object]]:
    """One message for each value that pydantic refuses, with its place below the section.

    The value comes along where the message only says what is wanted, else None. A union reports each of its
    members; the message of a bound says more than that of a member of another type.
    """
    chosen: dict[tuple[str | int, ...], Any] = {}
    for item in error.errors(include_url=False):
        place = (*item["loc"][:1], *(part for part in item["loc"][1:] if isinstance(part, int)))
        kept = chosen.get(place)
        if item["type"] != "missing" and (kept is None or (_is_type_error(kept) and not _is_type_error(item))):
            chosen[place] = item
    for place, item in chosen.items():
        wanted = _SHOULD.fullmatch(item["msg"])
        if wanted is None:
            yield place, item["msg"].removeprefix("Value error, "), None
        else:
            word = {"be": "a value ", "have": ""}.get(wanted[1], f"a value to {wanted[1]} ")
            yield place, f"wanted {word}{wanted[2]}", item["input"]


def _is_type_error(item: Any) -> bool:
    return item["type"].endswith("_type") or item["type"] in ("literal_error", "none_required")


def as_found(node: Node, value: object) -> str:
    """The value as it was written, or as it is where it came from elsewhere."""
    if isinstance(node, Scalar) and "${" not in str(node.value):
        return found(node)
    return show(value)
