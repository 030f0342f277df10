"""Sections to YAML that loads equal, and the hash of what they say."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.config.annotations import default_of, show
from meshtune.config.interpolate import escape
from meshtune.config.section import Section

# Text that every YAML reader, old or new, takes as text without quotes.
_PLAIN = re.compile(r"(?:\.{0,2}/)?[A-Za-z_][A-Za-z0-9_@+-]*(?:[./][A-Za-z0-9_@+-]+)*", re.ASCII)
_WORDS = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"])
# JSON leaves these unescaped, and YAML forbids them or reads them as line breaks.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def dump(section: Section) -> str:
    """YAML in declared order that `load` reads back equal: floats keep every bit, text that looks like
    another type is quoted, `${` is escaped. A None is left out where it is the default, and written as null
    where it is not."""
    return emit_mapping(plain(section))


def recipe_hash(section: Section) -> str:
    """SHA-256, in hex, of the resolved settings; equal for equal sections, whatever file they came from."""
    text = json.dumps(plain(section), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def plain(section: Section) -> dict[str, Any]:
    """The settings as dicts, lists and scalars, without a None that is the default anyway."""
    result = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is not None or field.is_required() or default_of(field) is not None:
            result[name] = _plain(value)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def emit_mapping(mapping: Mapping[str, Any], indent: int = 0) -> str:
    """Block YAML of a mapping: one line a key, nested mappings indented by two."""
    lines = []
    for key, value in mapping.items():
        head = f"{' ' * indent}{emit_text(key)}:"
        if isinstance(value, Mapping) and value:
            lines.append(f"{head}\n{emit_mapping(value, indent + 2)}")
        else:
            lines.append(f"{head} {emit_value(value)}\n")
    return "".join(lines) if lines or indent else "{}\n"


def emit_value(value: Any, raw: bool = False) -> str:
    """One value on one line; `raw` keeps `${...}` a reference."""
    if isinstance(value, Mapping):
        items = (f"{emit_text(key)}: {emit_value(item, raw)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, str):
        return emit_text(value if raw else escape(value))
    if isinstance(value, Sequence):
        return "[" + ", ".join(emit_value(item, raw) for item in value) + "]"
    return _float(value) if isinstance(value, float) else show(value)


def _float(value: float) -> str:
    """The shortest digits that read back equal, with the point and the sign that YAML 1.1 readers need."""
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def emit_text(text: str) -> str:
    """Text, in quotes where it could be taken for anything else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
