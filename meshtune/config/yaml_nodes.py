"""YAML text to nodes. Built from parser events, so that raw text, quoting and lines survive and no tag is
acted on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from meshtune.config.nodes import Entry, ListNode, MapNode, Node, Origin, Refused, Scalar, format_path
from meshtune.errors import Problem

MAX_DEPTH = 50
Path = tuple[str | int, ...]


class _TooDeepError(YAMLError):
    """Nesting beyond MAX_DEPTH, found at `origin`."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(f"found values nested deeper than {MAX_DEPTH} levels")
        self.origin = origin


def compose(text: str, file: str, numbered: bool = True) -> tuple[Node | None, list[Problem]]:
    """The node of one YAML document and every problem found in it; None where the text is empty or malformed.

    Plain keys `<<` merge mappings; aliases share the node of their anchor. Tags are refused.
    """
    composer = _Composer(text, file, numbered)
    try:
        return composer.document(), composer.problems
    except _TooDeepError as error:
        return None, [*composer.problems, Problem("", str(error), file, error.origin.line)]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark and numbered else None
        return None, [*composer.problems, Problem("", _syntax_message(error), file, line)]
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else None
        message = f"found the character U+{error.character:04X}; wanted it as an escape in double quotes"
        return None, [*composer.problems, Problem("", message, file, line)]


def _syntax_message(error: MarkedYAMLError) -> str:
    problem = str(error.problem)
    if r"'\t'" in problem or "tab" in problem.split():
        return "found a tab where YAML wants spaces; indent with spaces"
    mark = error.problem_mark or error.context_mark
    column = f" (column {mark.column + 1})" if mark else ""
    hint = ""
    if "cannot start any token" in problem:
        hint = "; put the value in quotes"
    elif "but got '{'" in problem:
        hint = "; inside braces and brackets, put `${...}` in quotes"
    elif "mapping values are not allowed" in problem:
        hint = "; check the indentation, and put a value that holds `: ` in quotes"
    begun = error.context_mark
    if mark and begun and begun.line != mark.line:
        column += f", {error.context} that begins on line {begun.line + 1}"
    return f"not valid YAML: {problem}{column}{hint}"


def _placed(value: Node, key_origin: Origin) -> Node:
    """The parser places an empty value at the next token, maybe lines further down; take its key's place."""
    empty = isinstance(value, Scalar) and value.plain and value.value == ""
    return replace(value, origin=key_origin) if empty else value


def _unknown_alias(name: str) -> str:
    return f"found *{name}, a YAML alias; wanted the anchor &{name} before it, or quotes around text with a *"


class _Composer:
    def __init__(self, text: str, file: str, numbered: bool) -> None:
        self.problems: list[Problem] = []
        self._file, self._numbered = file, numbered
        self._events: Iterator[Event] = iter(YAML(typ="safe", pure=True).parse(text))
        self._anchors: dict[str, Node] = {}

    def document(self) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
            elif isinstance(event, NodeEvent):
                node = self._node(event, ())
                root = node if documents == 1 else root
                if documents == 2:
                    message = "found a second YAML document; wanted one recipe in a file"
                    self._problem((), message, node.origin)
        return root

    def _problem(self, path: Path, message: str, origin: Origin) -> Refused:
        self.problems.append(Problem(format_path(path), message, origin.file, origin.line))
        return Refused(origin)

    def _origin(self, event: Event) -> Origin:
        return Origin(self._file, event.start_mark.line + 1 if self._numbered else None)

    def _node(self, event: Any, path: Path) -> Node:
        origin = self._origin(event)
        if len(path) > MAX_DEPTH:
            raise _TooDeepError(origin)
        if isinstance(event, AliasEvent):
            known = self._anchors.get(event.anchor)
            return known or self._problem(path, _unknown_alias(event.anchor), origin)
        if isinstance(event, ScalarEvent):
            node: Node = Scalar(event.value, origin, plain=event.style in (None, ""))
        elif isinstance(event, SequenceStartEvent):
            node = self._list(path, origin)
        else:
            node = self._mapping(path, origin)
        if event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            node = self._problem(path, f"found the tag {tag}; wanted a value without a tag", origin)
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _until(self, end: type[Event]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event

    def _list(self, path: Path, origin: Origin) -> ListNode:
        events = enumerate(self._until(SequenceEndEvent))
        return ListNode([self._node(event, (*path, index)) for index, event in events], origin)

    def _mapping(self, path: Path, origin: Origin) -> MapNode:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for event in self._until(MappingEndEvent):
            key = self._key(event, path)
            name = str(key.value) if key else "?"
            value = self._node(next(self._events), (*path, name))
            place = self._origin(event)
            if key and key.plain and name == "<<":
                merged = {**self._merged(value, path, place), **merged}
            elif name in entries:
                first = entries[name].origin.line
                once = f" (first on line {first})" if first else ""
                self._problem((*path, name), f"found this key a second time{once}; wanted it once", place)
            elif key:
                entries[name] = Entry(place, _placed(value, place))
        return MapNode({**merged, **entries}, origin)

    def _key(self, event: Event, path: Path) -> Scalar | None:
        node = self._node(event, path)
        if isinstance(node, Scalar):
            return node
        if not isinstance(node, Refused):
            self._problem(path, "found a list or a mapping as a key; wanted a name", self._origin(event))
        return None

    def _merged(self, value: Node, path: Path, origin: Origin) -> dict[str, Entry]:
        """What a merge key brings; of several mappings the earlier one wins, as in YAML's merge type."""
        sources = value.items if isinstance(value, ListNode) else [value]
        found: dict[str, Entry] = {}
        for source in sources:
            if isinstance(source, MapNode):
                found = {**source.entries, **found}
            elif not isinstance(source, Refused):
                message = "found a value to merge; wanted a mapping or a list of them"
                self._problem((*path, "<<"), message, origin)
        return found
