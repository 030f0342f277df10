"""Where a setting was written, for problems that show only after the recipe has been read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from meshtune.config.files import read_recipe
from meshtune.config.nodes import MapNode, Node, Origin
from meshtune.config.overrides import apply_overrides
from meshtune.config.section import Section

_SETTING = re.compile(r"(?P<key>[a-z_]+(?:\.[a-z_]+)+): ")


def with_places(cls: type[Section], text: str, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> str:
    """`text` in which each line that begins with a setting (`section.key: `) is preceded by its `file:line: `, or by the
    override that gave it. A setting that is written nowhere stays as it is."""
    root = read_recipe(os.fspath(path), [])
    if root is None:
        return text
    tree, _ = apply_overrides(cls, root, overrides)
    return "\n".join(_placed(line, tree) for line in text.split("\n"))


def _placed(line: str, tree: MapNode) -> str:
    setting = _SETTING.match(line)
    origin = _written(tree, setting["key"].split(".")) if setting else None
    if origin is None or origin.file is None:
        return line
    return f"{origin.file}:{origin.line}: {line}" if origin.line else f"{origin.file}: {line}"


def _written(tree: MapNode, parts: list[str]) -> Origin | None:
    node: Node = tree
    origin: Origin | None = None
    for part in parts:
        if not isinstance(node, MapNode) or part not in node.entries:
            return None
        origin, node = node.entries[part].origin, node.entries[part].node
    return origin
