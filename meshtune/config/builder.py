"""Nodes to sections, with every problem collected on the way."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import ValidationError

from meshtune.config.annotations import (
    alternatives,
    describe,
    has_default,
    is_section,
    section_class,
)
from meshtune.config.interpolate import InterpolationError, Interpolator
from meshtune.config.nodes import (
    ListNode,
    MapNode,
    Node,
    Origin,
    Refused,
    Scalar,
    format_path,
    nearest_origin,
    parse_path,
)
from meshtune.config.scalars import Mismatch, convert_scalar, found
from meshtune.config.section import Section
from meshtune.config.suggest import unknown_key
from meshtune.config.validation import as_found, field_errors
from meshtune.config.yaml_nodes import MAX_DEPTH
from meshtune.errors import Problem

Path = tuple[str | int, ...]
INVALID: Any = object()
_NOUNS = {ListNode: "a list", MapNode: "a mapping"}


class Builder:
    """Builds the root section from its nodes; `problems` holds all that stood in the way."""

    def __init__(self, cls: type[Section], root: MapNode) -> None:
        self.problems: list[Problem] = []
        self._cls, self._root = cls, root
        self._interpolator = Interpolator(cls, root)

    def build(self) -> Any:
        """The section, or INVALID. A section with problems of combination is built, and they are reported."""
        return self._section(self._cls, self._root, (), self._root.origin)

    def _fail(self, path: Path, message: str, origin: Origin) -> Any:
        self.problems.append(Problem(format_path(path), message, origin.file, origin.line))
        return INVALID

    def _convert(self, annotation: Any, node: Node, path: Path, origin: Origin) -> Any:
        if len(path) > MAX_DEPTH:
            return self._fail(path[:3], f"found values nested deeper than {MAX_DEPTH} levels", origin)
        try:
            node = self._interpolator.resolve(node)
        except InterpolationError as error:
            return self._fail(path, str(error), node.origin)
        if isinstance(node, Refused):
            return INVALID
        kinds = alternatives(annotation)
        if isinstance(node, Scalar):
            return self._scalar(annotation, kinds, node, path, origin)
        fitting = [kind for kind in kinds if _holds(kind, node)]
        if not fitting:
            return self._fail(path, f"found {_NOUNS[type(node)]}; wanted {describe(annotation)}", origin)
        return self._first_without_problems(fitting, node, path, origin)

    def _scalar(self, annotation: Any, kinds: tuple[Any, ...], node: Scalar, path: Path, origin: Origin) -> Any:
        if node.plain and node.value == "" and type(None) not in kinds and (cls := section_class(annotation)):
            # A section whose keys are all commented out: its defaults.
            return self._section(cls, MapNode({}, origin), path, origin)
        try:
            return convert_scalar(annotation, node)
        except Mismatch as mismatch:
            hint = f" ({mismatch})" if str(mismatch) else ""
            return self._fail(path, f"found {found(node)}; wanted {describe(annotation)}{hint}", node.origin)

    def _first_without_problems(self, kinds: list[Any], node: Node, path: Path, origin: Origin) -> Any:
        """The node as the first kind that takes it; if none does, the problems of the nearest one."""
        before, tries = self.problems, []
        for kind in kinds:
            self.problems = []
            value = self._collection(kind, node, path, origin)
            tries.append((len(self.problems), self.problems, value))
            if not self.problems:
                break
        _, problems, value = min(tries, key=lambda attempt: attempt[0])
        self.problems = before + problems
        return value

    def _collection(self, kind: Any, node: Node, path: Path, origin: Origin) -> Any:
        if isinstance(node, ListNode):
            return self._list(kind, node, path, origin)
        assert isinstance(node, MapNode)
        if is_section(kind):
            return self._section(kind, node, path, origin)
        value_type = get_args(kind)[1] if get_args(kind) else Any
        items = {
            key: self._convert(value_type, entry.node, (*path, key), entry.origin)
            for key, entry in node.entries.items()
        }
        return INVALID if any(item is INVALID for item in items.values()) else items

    def _list(self, kind: Any, node: ListNode, path: Path, origin: Origin) -> Any:
        container, types = get_origin(kind) or kind, get_args(kind)
        if container is tuple and Ellipsis not in types:
            if len(types) != len(node.items):
                return self._fail(path, f"found a list of {len(node.items)}; wanted {describe(kind)}", origin)
        else:
            types = (types[0] if types else Any,) * len(node.items)
        items = [
            self._convert(item_type, item, (*path, index), item.origin)
            for index, (item_type, item) in enumerate(zip(types, node.items, strict=True))
        ]
        if any(item is INVALID for item in items):
            return INVALID
        return tuple(items) if container is tuple else items

    def _section(self, cls: type[Section], node: MapNode, path: Path, origin: Origin) -> Any:
        values: dict[str, Any] = {}
        complete = True
        for key, entry in node.entries.items():
            field = cls.model_fields.get(key)
            if field is None:
                self._fail((*path, key), unknown_key(self._cls, cls, format_path(path), key), entry.origin)
                complete = False
            else:
                values[key] = self._convert(field.annotation, entry.node, (*path, key), entry.origin)
        for name, field in cls.model_fields.items():
            if name not in values and not has_default(field):
                self._fail((*path, name), _missing(cls, name), origin)
                complete = False
        section = self._validate(cls, values, node, path)
        if section is INVALID or not complete:
            return INVALID
        self._combinations(section, path)
        return section

    def _validate(self, cls: type[Section], values: dict[str, Any], node: MapNode, path: Path) -> Any:
        """Let pydantic check bounds and validators of the fields that have a value of the right type."""
        valid = {key: value for key, value in values.items() if value is not INVALID}
        try:
            section = cls.model_validate(valid)
        except ValidationError as error:
            for place, message, value in field_errors(error):
                if place and place[0] in node.entries:
                    entry = node.entries[str(place[0])]
                    message = message if value is None else f"found {as_found(entry.node, value)}; {message}"
                    self._fail((*path, *place), message, entry.origin)
                elif not place and len(valid) == len(values):
                    self._fail(path, message, node.origin)
            return INVALID
        return section if len(valid) == len(values) else INVALID

    def _combinations(self, section: Section, path: Path) -> None:
        for key, message in section.problems():
            parts = (int(part) if part.isdecimal() else part for part in parse_path(key) or ())
            place = (*path, *parts)
            self._fail(place, message, nearest_origin(self._root, place))
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if name not in section.model_fields_set and isinstance(value, Section) and has_default(field):
                self._combinations(value, (*path, name))


def _holds(kind: Any, node: Node) -> bool:
    container = get_origin(kind) or kind
    if isinstance(node, ListNode):
        return container in (list, tuple) or kind is Any
    return container is dict or kind is Any or is_section(kind)


def _missing(cls: type[Section], name: str) -> str:
    field = cls.model_fields[name]
    if inner := section_class(field.annotation):
        required = [key for key, item in inner.model_fields.items() if not has_default(item)]
        keys = f" with {', '.join(required)}" if required else ""
        return f"required and not written; wanted a section `{name}:`{keys}"
    meaning = f" ({field.description})" if field.description else ""
    return f"required and not written; wanted {describe(field.annotation)}{meaning}"
