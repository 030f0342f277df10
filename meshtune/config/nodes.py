"""What was written, and where, before any type is known: the tree between written values and sections."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True)
class Origin:
    """Where something was written: a file and its line, counted from 1, or the override as a whole."""

    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Scalar:
    """One value. `plain` holds raw YAML text, whose type the field decides; else `value` is a Python value.

    `literal` marks text in which `${...}` is no longer a reference.
    """

    value: object
    origin: Origin
    plain: bool = False
    literal: bool = False

    @property
    def is_null(self) -> bool:
        """Whether this is YAML's null (plain `null`, `~`, or nothing) or Python's None."""
        return self.value in NULLS if self.plain else self.value is None


@dataclass(frozen=True)
class ListNode:
    """A list."""

    items: list[Node]
    origin: Origin


@dataclass(frozen=True)
class Entry:
    """The value of one key, and where the key stands."""

    origin: Origin
    node: Node


@dataclass(frozen=True)
class MapNode:
    """A mapping, in the order written."""

    entries: dict[str, Entry]
    origin: Origin


@dataclass(frozen=True)
class Refused:
    """A value whose problem is already reported, so that nothing more is said about it."""

    origin: Origin


Node = Scalar | ListNode | MapNode | Refused


def from_python(value: object, origin: Origin, literal: bool = False) -> Node:
    """The node of a Python value: mappings, sections, lists, tuples, paths and scalars."""
    if isinstance(value, BaseModel):
        # A section has been resolved already: what looks like a reference in it is text.
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return from_python(fields, origin, literal=True)
    if isinstance(value, Mapping):
        entries = {str(key): Entry(origin, from_python(item, origin, literal)) for key, item in value.items()}
        return MapNode(entries, origin)
    if isinstance(value, list | tuple):
        return ListNode([from_python(item, origin, literal) for item in value], origin)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return Scalar(value, origin, literal=literal)


def merge(under: MapNode, over: MapNode) -> MapNode:
    """`over` laid over `under`: mappings merge key by key, everything else is replaced."""
    entries = dict(under.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        if below and isinstance(below.node, MapNode) and isinstance(entry.node, MapNode):
            entry = Entry(entry.origin, merge(below.node, entry.node))
        entries[key] = entry
    return MapNode(entries, over.origin)


def nearest_origin(root: MapNode, path: tuple[str | int, ...]) -> Origin:
    """Where the deepest written key on `path` stands; the start of the recipe if none is written."""
    node: Node = root
    origin = root.origin
    for part in path:
        if isinstance(node, MapNode) and part in node.entries:
            origin, node = node.entries[str(part)].origin, node.entries[str(part)].node
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            origin = node.origin
        else:
            break
    return origin


def parse_path(text: str) -> tuple[str, ...] | None:
    """The parts of `a.b.1` or `a.b[1]`; None if a part is empty or a bracket stands alone."""
    flat = re.sub(r"\[(\d+)\]", r".\1", text)
    parts = tuple(part.strip() for part in flat.split("."))
    return parts if all(parts) and not set("[]") & set(flat) else None


def format_path(path: tuple[str | int, ...]) -> str:
    """`("optimizer", "betas", 1)` as `optimizer.betas[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
