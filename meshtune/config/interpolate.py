"""`${env:NAME}` and `${section.key}` inside the values of a recipe.

A value that is one reference and nothing else becomes what it refers to, whatever that is; a reference inside
text is put in as text. Either way the field that holds it gives the type. `$${` is a literal `${`. The text
of an environment variable is never searched for references.
"""

from __future__ import annotations

import dataclasses
import os
import re

from meshtune.config.annotations import show
from meshtune.config.nodes import MapNode, Node, Scalar, parse_path
from meshtune.config.section import Section
from meshtune.config.tree import child

_PIECE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_ENV = re.compile(r"env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*")
_MAX_TEXT = 1 << 16


class InterpolationError(Exception):
    """A reference that cannot be followed; the text says why."""


def escape(text: str) -> str:
    """Text in which every `${` reads as itself."""
    return text.replace("${", "$${")


class Interpolator:
    """Resolves the references in the nodes of one recipe of class `cls`."""

    def __init__(self, cls: type[Section], root: MapNode) -> None:
        self._cls, self._root = cls, root
        self._open: list[str] = []
        self._known: dict[str, Node] = {}

    def resolve(self, node: Node) -> Node:
        """The node with its own references replaced; those inside a list or mapping wait until they are
        reached.

        Raises InterpolationError.
        """
        if not isinstance(node, Scalar) or node.literal or not isinstance(node.value, str) or "${" not in node.value:
            return node
        whole = re.fullmatch(r"\s*\$\{([^{}]*)\}\s*", node.value)
        if whole:
            target = self._follow(whole[1])
            return dataclasses.replace(target, origin=node.origin) if isinstance(target, Scalar) else target
        referred = any(match[1] is not None for match in _PIECE.finditer(node.value))
        text = _PIECE.sub(self._text, node.value)
        if len(text) > _MAX_TEXT:
            raise InterpolationError(f"found references that make {len(text)} characters; wanted {_MAX_TEXT} at most")
        return dataclasses.replace(node, value=text, plain=node.plain or referred, literal=True)

    def _text(self, match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] is None:
            raise InterpolationError(
                "found `${` without its `}`; wanted `${section.key}`, or `$${` for the text itself"
            )
        target = self._follow(match[1])
        if not isinstance(target, Scalar) or target.is_null:
            kind = "null" if isinstance(target, Scalar) else "a list or a section"
            raise InterpolationError(f"${{{match[1]}}} is {kind}; wanted a single value to put into text")
        return str(target.value) if isinstance(target.value, str) else show(target.value)

    def _follow(self, reference: str) -> Node:
        if env := _ENV.fullmatch(reference):
            return self._environment(env[1])
        if reference.startswith("env:"):
            raise InterpolationError(f"found ${{{reference}}}; wanted the name of an environment variable after env:")
        if reference in self._open:
            chain = " -> ".join([*self._open[self._open.index(reference) :], reference])
            raise InterpolationError(f"found references that go round in a circle: {chain}")
        if reference not in self._known:
            self._open.append(reference)
            try:
                self._known[reference] = self._lookup(reference)
            finally:
                self._open.pop()
        return self._known[reference]

    def _environment(self, name: str) -> Scalar:
        if name not in os.environ:
            raise InterpolationError(f"the environment variable {name} is not set; wanted a value in it")
        return Scalar(os.environ[name], self._root.origin, plain=True, literal=True)

    def _lookup(self, reference: str) -> Node:
        cls: type[Section] | None = self._cls
        node: Node = self._root
        for part in parse_path(reference) or ("",):
            cls, inner = child(cls, node, part)
            if inner is None:
                hint = f" (for the environment variable write ${{env:{reference}}})" if "." not in reference else ""
                raise InterpolationError(f"${{{reference}}} refers to nothing; wanted a key of this recipe{hint}")
            node = self.resolve(inner)
        return node
