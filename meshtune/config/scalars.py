"""One scalar to one typed value. The field's type decides what raw text means, never the look of the text
alone.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from decimal import Decimal
from typing import Any

from meshtune.config.annotations import alternatives, literal_options, show
from meshtune.config.nodes import Scalar

INTEGER = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d+(_\d+)*(\.(\d+(_\d+)*)?)?|\.\d+(_\d+)*)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?\.?(inf|infinity|nan)", re.IGNORECASE)
_ORDER = (type(None), bool, int, float, str)
_SHOWN = 80


class Mismatch(Exception):
    """A scalar that is not of the wanted type; its text is a hint for the user, or empty."""


def found(scalar: Scalar) -> str:
    """What was written, in a user's words."""
    value = scalar.value
    if scalar.plain:
        return _clip(str(value)) or "nothing"
    if isinstance(value, str):
        return f'"{_clip(value)}"'
    if value is None or isinstance(value, bool | int | float):
        return _clip(show(value))
    return f"{_clip(repr(value))} ({type(value).__name__})"


def _clip(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."


def convert_scalar(annotation: Any, scalar: Scalar) -> Any:
    """The value that a scalar has as one of the annotation's alternatives.

    Tried in this order: Literal values, null, bool, int, float, text; so text takes what nothing narrower
    takes. Raises Mismatch.
    """
    kinds = alternatives(annotation)
    if Any in kinds:
        kinds = _ORDER
    hints = []
    if options := literal_options(kinds):
        try:
            return _as_literal(options, scalar)
        except Mismatch as mismatch:
            hints.append(str(mismatch))
    for kind in (kind for kind in _ORDER if kind in kinds):
        try:
            return _as_type(kind, scalar, exact=float in kinds or kinds is _ORDER)
        except Mismatch as mismatch:
            hints.append(str(mismatch))
    raise Mismatch(next(filter(None, hints), ""))


def _as_type(kind: type, scalar: Scalar, exact: bool) -> Any:
    if kind is type(None):
        if not scalar.is_null:
            raise Mismatch
        return None
    if kind is bool:
        return _as_bool(scalar)
    if kind is int:
        return _as_int(scalar, exact)
    return _as_float(scalar) if kind is float else _as_text(scalar)


def _as_literal(options: tuple[Any, ...], scalar: Scalar) -> Any:
    for option in options:
        if option == scalar.value if isinstance(option, str) else _is_value(option, scalar):
            return option
    names = {option.lower(): option for option in options if isinstance(option, str)}
    near = difflib.get_close_matches(str(scalar.value).lower(), names, n=1)
    raise Mismatch(f"did you mean {names[near[0]]}?" if near else "")


def _is_value(option: object, scalar: Scalar) -> bool:
    try:
        return _as_type(type(option), scalar, exact=True) == option
    except Mismatch:
        return False


def _as_bool(scalar: Scalar) -> bool:
    value = scalar.value
    if isinstance(value, bool):
        return value
    lowered = value.lower() if isinstance(value, str) else ""
    if lowered not in ("true", "false"):
        meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(lowered)
        raise Mismatch(f"did you mean {meant}?" if meant else "")
    if not scalar.plain:
        raise Mismatch("remove the quotes")
    return lowered == "true"


def _as_int(scalar: Scalar, exact: bool) -> int:
    """An integer; unless `exact`, a number written as `1e3` or `1000.0` is one too."""
    value = scalar.value
    if isinstance(value, str):
        text = _number_text(scalar)
        if INTEGER.fullmatch(text) and len(text) < 4300:  # the limit of Python's own int()
            return int(text)
        if exact or not _float(text).is_integer():
            raise Mismatch
        return int(Decimal(text.replace("_", "")))
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if exact or not (isinstance(value, float) and value.is_integer()):
        raise Mismatch
    return int(value)


def _as_float(scalar: Scalar) -> float:
    value = scalar.value
    if isinstance(value, str):
        return _float(_number_text(scalar))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Mismatch
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return _finite(number)


def _number_text(scalar: Scalar) -> str:
    text = str(scalar.value)
    if NOT_FINITE.fullmatch(text):
        raise Mismatch("it must be finite")
    if not NUMBER.fullmatch(text):
        raise Mismatch
    if not scalar.plain:
        raise Mismatch("remove the quotes")
    if re.match(r"[+-]?0_*\d", text):
        # YAML 1.1 reads 010 as 8 and YAML 1.2 as 10.
        raise Mismatch("remove the leading zeros")
    return text


def _float(text: str) -> float:
    number = float(text)
    if number == 0 and re.search(r"[1-9]", re.split("[eE]", text)[0]):
        raise Mismatch("it is too small for a float")
    return _finite(number)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise Mismatch("it must be finite and fit a float")
    return number


def _as_text(scalar: Scalar) -> str:
    value = scalar.value
    if not isinstance(value, str):
        raise Mismatch("write text in quotes" if isinstance(value, bool | int | float) else "")
    if scalar.is_null:
        raise Mismatch
    if scalar.plain and value.lower() in ("true", "false"):
        raise Mismatch("put it in quotes if the text is meant")
    return value
