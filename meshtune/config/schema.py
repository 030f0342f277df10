"""JSON Schema 2020-12 of a recipe, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from meshtune.config.annotations import section_class
from meshtune.config.section import Section

_REFERENCE = r"\$\{.+\}"
_GROUPED_DIGITS = r"^[+-]?[0-9]+(_[0-9]+)+(\.[0-9]*)?([eE][+-]?[0-9]+)?$"
# An editor sees `010` as a number where the loader sees text.
_TEXT = ["string", "number"]
BASE_DESCRIPTION = (
    "Path of the recipe that this one extends, relative to this file, or a list of paths (a later one wins)."
)


def json_schema(cls: type[Section]) -> dict[str, Any]:
    """The schema of a recipe of class `cls`.

    `${...}` may stand for any value but a whole section; a recipe with a `base` may leave out what it brings.
    """
    schema = cls.model_json_schema()
    objects = [schema, *schema.get("$defs", {}).values()]
    for item in objects:
        item.pop("required", None)
        properties = {name: _lenient(prop) for name, prop in item.get("properties", {}).items()}
        item["properties"] = properties
        item["additionalProperties"] = False
    paths: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    schema["properties"] = {"base": {"anyOf": paths, "description": BASE_DESCRIPTION}, **schema["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "if": {"required": ["base"]},
        "then": {},
        "else": _required(cls),
    }


def _required(cls: type[Section]) -> dict[str, Any]:
    """What must be written in a recipe that stands alone."""
    fields = cls.model_fields.items()
    needed = [name for name, field in fields if field.is_required()]
    inner = {name: _required(section) for name, field in fields if (section := section_class(field.annotation))}
    inner = {name: rule for name, rule in inner.items() if rule}
    return {**({"required": needed} if needed else {}), **({"properties": inner} if inner else {})}


def _lenient(prop: dict[str, Any]) -> dict[str, Any]:
    """One value's schema, with references allowed and what editors read as another type accepted."""
    outer: dict[str, Any] = {key: prop[key] for key in ("description", "default") if key in prop}
    inner = {key: item for key, item in prop.items() if key not in ("title", "description", "default")}
    if "$ref" in inner or not inner:
        return {**outer, **inner}
    options = [_option(option) for option in inner.get("anyOf", [inner])]
    if not any(option.get("type") == _TEXT for option in options):
        options.append({"type": "string", "pattern": _reference_pattern(options)})
    return {**outer, **options[0]} if len(options) == 1 else {**outer, "anyOf": options}


def _option(option: dict[str, Any]) -> dict[str, Any]:
    if option.get("type") == "string" and not {"enum", "const"} & set(option):
        return {**option, "type": _TEXT}
    nested = [key for key in ("items", "additionalProperties") if isinstance(option.get(key), dict)]
    inner: dict[str, Any] = {key: _lenient(option[key]) for key in nested}
    if "prefixItems" in option:
        inner["prefixItems"] = [_lenient(item) for item in option["prefixItems"]]
    return {**option, **inner}


def _reference_pattern(options: list[dict[str, Any]]) -> str:
    numeric = any(option.get("type") in ("integer", "number") for option in options)
    return f"{_REFERENCE}|{_GROUPED_DIGITS}" if numeric else _REFERENCE
