"""`section.key=value` from the command line, laid over the nodes of a recipe."""

from __future__ import annotations

from collections.abc import Iterable

from meshtune.config.nodes import Entry, ListNode, MapNode, Node, Origin, parse_path
from meshtune.config.section import Section
from meshtune.config.tree import child, is_absent
from meshtune.config.yaml_nodes import compose
from meshtune.errors import Problem


def apply_overrides(cls: type[Section], root: MapNode, overrides: Iterable[str]) -> tuple[MapNode, list[Problem]]:
    """The recipe with every override set, the last one winning, and the problems of those that cannot be.

    The value is YAML, as if it stood in the recipe at that place. A number in the path addresses an item that
    a list already has, written or by default (`optimizer.betas.1=0.95` or `optimizer.betas[1]=0.95`). A
    mapping replaces the whole section: settings that it leaves out go back to their defaults.
    """
    problems: list[Problem] = []
    for override in overrides:
        try:
            root = _apply(cls, root, override)
        except _OverrideError as error:
            path = parse_path(override.partition("=")[0]) if "=" in override else None
            problems.append(Problem(".".join(path or ()), str(error), override_name(override)))
    return root, problems


class _OverrideError(Exception):
    """An override that cannot be applied; the text says why."""


def override_name(override: str) -> str:
    """What stands in place of a file in the problems of an override."""
    return f'override "{override}"'


def _apply(cls: type[Section], root: MapNode, override: str) -> MapNode:
    key, equals, text = override.partition("=")
    if not equals:
        raise _OverrideError("found no `=`; wanted section.key=value")
    path = parse_path(key)
    if path is None:
        raise _OverrideError(f"found the key `{key}`; wanted section.key=value")
    if path[0] == "base":
        raise _OverrideError("only a file can name its base; write `base:` in the recipe")
    origin = Origin(override_name(override))
    node = _set(cls, root, path, 0, _value(text, origin), origin)
    assert isinstance(node, MapNode)
    return node


def _value(text: str, origin: Origin) -> Node:
    """The node of the value, parsed as what stands after `key: `."""
    assert origin.file is not None
    if text.lstrip().startswith("#") or (" #" in text and text.strip()[0] not in "\"'[{"):
        raise _OverrideError("found a `#`, which begins a comment in YAML; wanted the value in quotes")
    node, problems = compose(f"value: {text}", origin.file, numbered=False)
    if problems:
        raise _OverrideError(problems[0].message)
    if not isinstance(node, MapNode) or set(node.entries) != {"value"}:
        raise _OverrideError("found more than one value; wanted one")
    return node.entries["value"].node


def _set(
    cls: type[Section] | None,
    node: Node | None,
    path: tuple[str, ...],
    depth: int,
    value: Node,
    origin: Origin,
) -> Node:
    """`node`, which stands at `path[:depth]`, with `value` put in at `path`."""
    if depth == len(path):
        return value
    key = path[depth]
    if isinstance(node, ListNode):
        return _set_item(node, path, depth, value, origin)
    if is_absent(node) and not key.isdecimal():
        node = MapNode({}, origin)
    if not isinstance(node, MapNode):
        here = ".".join(path[:depth])
        raise _OverrideError(f"{here} is no list or section, so it has no {key}; wanted {here}=... as a whole")
    written = node.entries.get(key)
    inner, below = child(cls, node, key)
    if written is None and inner is not None:
        below = None  # a section's own defaults fill in what is not written; copying them here would hide that
    last = depth + 1 == len(path)
    entry = Entry(
        origin if written is None or last else written.origin,
        _set(inner, below, path, depth + 1, value, origin),
    )
    return MapNode({**node.entries, key: entry}, node.origin)


def _set_item(node: ListNode, path: tuple[str, ...], depth: int, value: Node, origin: Origin) -> ListNode:
    key, here = path[depth], ".".join(path[:depth])
    index = int(key) if key.isdecimal() else len(node.items)
    if index >= len(node.items):
        raise _OverrideError(f"{here} has {len(node.items)} items, counted from 0, and no item {key}")
    items = list(node.items)
    items[index] = _set(None, items[index], path, depth + 1, value, origin)
    return ListNode(items, node.origin)
