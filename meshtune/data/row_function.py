"""A user's own Python function over rows: `data.row_function: prepare.py:my_rows`."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from meshtune.data.rows import LEFT_OUT, Row
from meshtune.errors import DataError

RowFunction = Callable[[dict[str, Any]], Any]

_PLACE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
_WANTED = "wanted path/to/file.py:function"


def problem(place: str) -> str | None:
    """Return what is wrong with how a function is named, before any file is looked at."""
    return None if _PLACE.fullmatch(place) else f"{place!r} names no function in a file; {_WANTED}"


def apply(place: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield what the function makes of each readable row: a row, several, or one with the problem `LEFT_OUT` for None.

    Raises DataError, naming the row, where the function raises or returns something else.
    """
    function = _load(place, digest_of(place))
    for row in rows:
        if row.columns is None:
            yield row
        else:
            yield from _made(row, _called(function, row, place), place)


def digest_of(place: str) -> str:
    """Return the name of the function and a hash of its file. Raises DataError where there is no such file."""
    path, name = _parts(place)
    try:
        return f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:
        raise DataError(f"data.row_function: {path}: {error.strerror or error} (looked in {Path.cwd()})") from error


@cache
def _load(place: str, _digest: str) -> RowFunction:
    path, name = _parts(place)
    spec = importlib.util.spec_from_file_location(f"meshtune_row_function_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        raise DataError(f"data.row_function: {path} cannot be imported: {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise DataError(f"data.row_function: {path} has no function {name}; it has {', '.join(known) or 'none'}")
    return function


def _called(function: RowFunction, row: Row, place: str) -> Any:
    try:
        return function(dict(row.columns or {}))
    except Exception as error:
        line = _line_in(error, _parts(place)[0])
        raise DataError(f"{row.name}: data.row_function {place} failed{line}: {_told(error)}") from error


def _made(row: Row, result: Any, place: str) -> Iterator[Row]:
    if result is None:
        yield Row(row.name, None, LEFT_OUT)
    elif isinstance(result, dict):
        yield Row(row.name, result)
    elif isinstance(result, list) and all(isinstance(item, dict) for item in result):
        if not result:
            yield Row(row.name, None, LEFT_OUT)
        for number, item in enumerate(result):
            yield Row(f"{row.name}[{number}]", item)
    else:
        raise DataError(
            f"{row.name}: data.row_function {place} returned {type(result).__name__}; wanted a dict of columns, a list of "
            "dicts, or None to leave the row out"
        )


def _parts(place: str) -> tuple[Path, str]:
    found = _PLACE.fullmatch(place)
    if found is None:
        raise DataError(f"data.row_function: {problem(place)}")
    return Path(found["path"]).expanduser(), found["name"]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _line_in(error: Exception, path: Path) -> str:
    """Return where in the user's file an error arose."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == path.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"
