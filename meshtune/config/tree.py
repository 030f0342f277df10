"""Walking a recipe's nodes along the declared sections, defaults included, so that what is not written can be
addressed.
"""

from __future__ import annotations

from meshtune.config.annotations import default_of, has_default, section_class
from meshtune.config.nodes import ListNode, MapNode, Node, Origin, Scalar, from_python
from meshtune.config.section import Section


def child(cls: type[Section] | None, node: Node, key: str) -> tuple[type[Section] | None, Node | None]:
    """The value under `key` of a node of section `cls` (None outside sections), and its own section class.

    What is not written is the declared default; a required section that is not written is an empty mapping.
    The node is None where there is nothing under the key.
    """
    if isinstance(node, ListNode):
        index = int(key) if key.isdecimal() else -1
        return None, node.items[index] if 0 <= index < len(node.items) else None
    if not isinstance(node, MapNode):
        return None, None
    field = cls.model_fields.get(key) if cls else None
    inner = section_class(field.annotation) if field else None
    if key in node.entries:
        return inner, node.entries[key].node
    if field is None:
        return None, None
    if has_default(field):
        return inner, from_python(default_of(field), Origin(), literal=True)
    return inner, MapNode({}, Origin()) if inner else None


def is_absent(node: Node | None) -> bool:
    """Whether there is nothing here, or null."""
    return node is None or (isinstance(node, Scalar) and node.is_null)
