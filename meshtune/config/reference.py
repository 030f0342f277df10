"""The recipe reference in Markdown and the commented starter recipe, both written from the sections
themselves.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from meshtune.config.annotations import default_of, describe_field, section_class, sections
from meshtune.config.dump import emit_value
from meshtune.config.loader import from_mapping
from meshtune.config.schema import BASE_DESCRIPTION
from meshtune.config.section import Section

_WIDTH = 100


def reference(cls: type[Section]) -> str:
    """Markdown: for every section a table of its keys with type, default and meaning, in declared order."""
    parts = []
    for path, section in sections(cls):
        title = f"`{'.'.join(path)}`" if path else "Top level"
        rows = [_row(name, field) for name, field in section.model_fields.items()]
        if not path:
            rows.insert(0, f"| `base` | text or a list of text | not set | {BASE_DESCRIPTION} |")
        header = "| Key | Type | Default | Meaning |\n|---|---|---|---|"
        parts.append("\n\n".join(filter(None, [f"## {title}", _about(section), "\n".join([header, *rows])])))
    return "\n\n".join(parts) + "\n"


def _about(section: type[Section]) -> str:
    """The section's own docstring; an inherited one says nothing about it."""
    return inspect.cleandoc(section.__doc__ or "") if section.__doc__ != Section.__doc__ else ""


def _row(name: str, field: FieldInfo) -> str:
    inner = section_class(field.annotation)
    meaning = field.description or (_about(inner).partition("\n")[0] if inner else "")
    cells = [f"`{name}`", describe_field(field), _default(field), " ".join(meaning.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = default_of(field)
    if value is None:
        return "not set"
    return "its own defaults" if isinstance(value, Section) else f"`{emit_value(value)}`"


def starter(cls: type[Section], values: Mapping[str, Any]) -> str:
    """A recipe to start from: `values` as active lines under the description of each key, and the other keys
    of those sections as comments with their defaults.

    `values` holds plain values, nested like a recipe; a `${...}` in them stays a reference.
    Raises RecipeError if they do not make a recipe.
    """
    from_mapping(cls, values)
    lines = _comment(_about(cls), 0)
    lines += _starter_lines(cls, values, 0)
    unused = [".".join(path) for path, _ in sections(cls) if path and _is_unused(path, values)]
    if unused:
        further = f"Further sections, described in the recipe reference: {', '.join(unused)}."
        lines += ["", *_comment(further, 0)]
    return "\n".join(lines).strip("\n") + "\n"


def _is_unused(path: tuple[str, ...], values: Mapping[str, Any]) -> bool:
    """Whether `values` lack the section at `path`, and have the one around it."""
    *around, name = path
    for key in around:
        if key not in values:
            return False
        values = values[key]
    return name not in values


def _starter_lines(cls: type[Section], values: Mapping[str, Any], indent: int) -> list[str]:
    lines = []
    for name, field in cls.model_fields.items():
        inner = section_class(field.annotation)
        if name in values:
            lines += _active(name, values[name], field, inner, indent)
        elif inner is None:
            note = " ".join((field.description or "").split())
            line = f"{' ' * indent}# {name}: {emit_value(default_of(field))}"
            lines.append(f"{line}  # {note}" if note else line)
    return lines


def _active(name: str, value: Any, field: FieldInfo, inner: type[Section] | None, indent: int) -> list[str]:
    pad = " " * indent
    if inner and isinstance(value, Mapping):
        about = field.description or _about(inner).partition("\n")[0]
        head = ["", *_comment(about, indent), f"{pad}{name}:"]
        return head + _starter_lines(inner, value, indent + 2)
    return [*_comment(field.description or "", indent), f"{pad}{name}: {emit_value(value, raw=True)}"]


def _comment(text: str, indent: int) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    prefix = " " * indent + "# "
    return [
        line
        for part in paragraphs
        for line in textwrap.wrap(part, _WIDTH, initial_indent=prefix, subsequent_indent=prefix)
    ]
