"""Reading type annotations: their alternatives, the sections in them, and words for them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from meshtune.config.section import Section

_ATOMS = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
_PLURALS = {str: "text", int: "integers", float: "numbers"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >=", "max_length": "length <="}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, flat and without `Annotated`; the annotation itself where it is none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in alternatives(member))
    return (type(None) if annotation is None else annotation,)


def section_class(annotation: Any) -> type[Section] | None:
    """The first section among the alternatives of an annotation."""
    return next((kind for kind in alternatives(annotation) if is_section(kind)), None)


def is_section(kind: Any) -> bool:
    """Whether a type is a section."""
    return isinstance(kind, type) and issubclass(kind, Section)


def sections(cls: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """`cls` and every section inside it, each with its path, in declared order."""
    yield path, cls
    for name, field in cls.model_fields.items():
        if inner := section_class(field.annotation):
            yield from sections(inner, (*path, name))


def literal_options(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of every Literal among the alternatives."""
    return tuple(option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind))


def show(value: object) -> str:
    """A scalar as one writes it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def describe(annotation: Any) -> str:
    """A type in a user's words, for "wanted ..."."""
    kinds = alternatives(annotation)
    options = [show(option) for option in literal_options(kinds)]
    words = []
    if options:
        words.append(options[0] if len(options) == 1 else f"one of {', '.join(options)}")
    words += [_describe_one(kind) for kind in kinds if get_origin(kind) is not Literal]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _describe_one(kind: Any) -> str:
    if kind in _ATOMS:
        return _ATOMS[kind]
    if kind is Any:
        return "any value"
    if is_section(kind):
        return "a section"
    return _describe_collection(get_origin(kind) or kind, get_args(kind))


def _describe_collection(container: Any, items: tuple[Any, ...]) -> str:
    if container is dict:
        return f"a mapping of names to {_PLURALS.get(items[1]) or describe(items[1])}"
    if container is tuple and items[-1] is not Ellipsis:
        return f"a list of {len(items)}: {', '.join(describe(item) for item in items)}"
    if container in (list, tuple):
        return f"a list of {_PLURALS.get(items[0]) or f'({describe(items[0])})'}"
    raise TypeError(f"a section cannot have a field of type {container}")


def describe_field(field: FieldInfo) -> str:
    """A field's type with its bounds, such as `a number > 0`."""
    bounds = ", ".join(bound for meta in field.metadata for bound in _bounds(meta))
    if not bounds:
        return describe(field.annotation)
    bounded = [kind for kind in alternatives(field.annotation) if kind is not type(None)]
    null = " or null" if type(None) in alternatives(field.annotation) else ""
    return f"{describe(Union[tuple(bounded)])} {bounds}{null}"  # noqa: UP007


def _bounds(meta: object) -> Iterator[str]:
    if isinstance(meta, annotated_types.BaseMetadata):
        for name, sign in _BOUNDS.items():
            if getattr(meta, name, None) is not None:
                yield f"{sign} {getattr(meta, name)}"


def has_default(field: FieldInfo) -> bool:
    """Whether a field may be left out."""
    return not field.is_required()


def default_of(field: FieldInfo) -> Any:
    """A field's default value; None where it is required."""
    return None if field.is_required() else field.get_default(call_default_factory=True)
