"""Rows of columnar data as Python values, without what the columns have added.

A column gives every struct all fields of all rows, null where a row had none: those are left out, at every depth. What says
its keys itself, a map or a field of JSON, keeps its nulls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Clean = Callable[[Any], Any]

_JSON = "arrow.json"


def row_cleaner(schema: Any, decoded: bool = False) -> Clean:
    """Return what makes a row of a `pyarrow.Schema`, as `to_pylist` gives it, into a row as it was written. `decoded` says that
    fields of JSON are values already, as those of `datasets` are.
    """
    return _struct({field.name: _cleaner(field.type, decoded) for field in schema})


def without_nulls(value: Any) -> Any:
    """Return a value of which no type is known without the null fields of its objects, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _cleaner(kind: Any, decoded: bool) -> Clean | None:
    """Return what cleans values of a type that are not null; None where there is nothing to do."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == _JSON:
        return None if decoded else _from_json
    if types.is_struct(kind):
        return _struct({field.name: _cleaner(field.type, decoded) for field in kind})
    if types.is_map(kind):
        return _map(_cleaner(kind.item_type, decoded))
    value_type = getattr(kind, "value_type", None)
    of_value = None if value_type is None else _cleaner(value_type, decoded)
    encoded = types.is_dictionary(kind) or types.is_run_end_encoded(kind)
    return of_value if of_value is None or encoded else _list(of_value)


def _struct(fields: dict[str, Clean | None]) -> Clean:
    def clean(value: Any) -> Any:
        if not isinstance(value, dict):  # `datasets` has made something else of it
            return value
        cleaned = {}
        for key, item in value.items():
            if item is not None:
                of_field = fields.get(key)
                cleaned[key] = item if of_field is None else of_field(item)
        return cleaned

    return clean


def _map(of_item: Clean | None) -> Clean:
    """`to_pylist` gives a map as a list of pairs."""

    def clean(value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        return {key: item if item is None or of_item is None else of_item(item) for key, item in pairs}

    return clean


def _list(of_item: Clean) -> Clean:
    def clean(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [item if item is None else of_item(item) for item in value]

    return clean


def _from_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):  # it says that it is JSON, and is not
        return text
