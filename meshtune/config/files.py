"""Recipe files and the files they are based on."""

from __future__ import annotations

import os

from meshtune.config.nodes import Entry, ListNode, MapNode, Node, Origin, Refused, Scalar, merge
from meshtune.config.scalars import found
from meshtune.config.yaml_nodes import compose
from meshtune.errors import Problem

BASE = "base"


def read_recipe(path: str, problems: list[Problem]) -> MapNode | None:
    """The nodes of a recipe file laid over those of its `base` files; None if a file could not be read.

    `base` is a path, or a list of paths of which a later one wins, relative to the file that names it.
    Problems are appended and name the file in which they stand.
    """
    return _read(path, Origin(path), (), problems)


def _read(path: str, named_at: Origin, chain: tuple[str, ...], problems: list[Problem]) -> MapNode | None:
    real = os.path.realpath(path)
    key = BASE if chain else ""
    if real in chain:
        message = f"found bases that go round in a circle, back to {path}"
        problems.append(Problem(key, message, named_at.file, named_at.line))
        return None
    text = _text(path, named_at, key, problems)
    if text is None:
        return None
    node, broken = compose(text, path)
    problems += broken
    if node is None and not broken:
        problems.append(Problem("", "found an empty file; wanted a mapping of sections", path))
    if isinstance(node, MapNode):
        return _on_bases(node, path, (*chain, real), problems)
    if node is not None and not isinstance(node, Refused):
        kind = "a list" if isinstance(node, ListNode) else "a single value"
        message = f"found {kind}; wanted a mapping of sections"
        problems.append(Problem("", message, path, node.origin.line))
    return None


def _text(path: str, named_at: Origin, key: str, problems: list[Problem]) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problems.append(Problem("", "found bytes that are not UTF-8; save the file as UTF-8", path, line))
    except FileNotFoundError:
        problems.append(Problem(key, f"there is no file {path}", named_at.file, named_at.line))
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        problems.append(Problem(key, message, named_at.file, named_at.line))
    return None


def _on_bases(node: MapNode, path: str, chain: tuple[str, ...], problems: list[Problem]) -> MapNode | None:
    entry = node.entries.get(BASE)
    own = MapNode({key: item for key, item in node.entries.items() if key != BASE}, node.origin)
    if entry is None:
        return own
    merged = MapNode({}, node.origin)
    complete = True
    for name in _base_names(entry, problems):
        base = os.path.normpath(os.path.join(os.path.dirname(path), name))
        below = _read(base, entry.origin, chain, problems)
        complete = complete and below is not None
        merged = merge(merged, below) if below else merged
    return merge(merged, own) if complete else None


def _base_names(entry: Entry, problems: list[Problem]) -> list[str]:
    nodes: list[Node] = entry.node.items if isinstance(entry.node, ListNode) else [entry.node]
    names = []
    for node in nodes:
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.value and "${" not in node.value:
            names.append(node.value)
        elif not isinstance(node, Refused):
            what = found(node) if isinstance(node, Scalar) else "a list or a mapping"
            message = f"found {what}; wanted the path of a recipe file, or a list of paths, without ${{...}}"
            problems.append(Problem(BASE, message, entry.origin.file, entry.origin.line))
    return names
