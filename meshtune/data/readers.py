"""Readers of JSON files. They keep rows as they were written: no column is unified or added.

JSON is read as bytes and cut at line feeds alone, so that neither the locale nor a U+2028 inside a text
matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from meshtune.data.compressed import open_bytes
from meshtune.data.rows import Row, RowProblem
from meshtune.data.shapes import COLUMNS
from meshtune.errors import DataError

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_json_lines(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a JSON-lines file, named `file:line` with lines counted from 1; blank lines are no
    rows.
    """
    with open_bytes(path, name) as file:
        yield from rows_of_lines(file, name)


def rows_of_lines(lines: Iterable[bytes], name: str, first: int = 1) -> Iterator[Row]:
    """Yield the rows of lines, the first of which is the file's line `first`."""
    for number, line in enumerate(lines, start=first):
        if number == 1:
            line = without_bom(line, name)
        line = line.strip(b" \t\r\n")
        if line:
            yield _parse(line, f"{name}:{number}")


def read_json(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a JSON file: one list of objects, or one object that holds one (`file:row N`, from 0), else
    JSON lines.

    Raises DataError when a list is not valid JSON: no row of it can be told from another.
    """
    with open_bytes(path, name) as file:
        one_value = _starts_one_value(file, name)
    if not one_value:
        yield from read_json_lines(path, name)
        return
    with open_bytes(path, name) as file:
        content = file.read()
    for number, value in enumerate(_list_in(_whole(content, name), name, columns)):
        yield _checked(value, f"{name}:row {number}")


def without_bom(head: bytes, name: str) -> bytes:
    """Return the start of a file without UTF-8's mark. Raises DataError for UTF-16."""
    if head.startswith(_UTF16_BOMS):
        raise DataError(f"{name}: the file is UTF-16; save it as UTF-8")
    return head.removeprefix(_UTF8_BOM)


def _starts_one_value(file: IO[bytes], name: str) -> bool:
    """Tell a file that is one list or object from lines: an object that is whole on a line, with another line after it,
    is a row.
    """
    line = without_bom(file.readline(), name)
    while line and not line.strip():
        line = file.readline()
    if line.lstrip().startswith(b"["):
        return True
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        following = next((part for part in file if part.strip()), b"")
        return line.lstrip().startswith(b"{") and not following.lstrip().startswith(b"{")
    return line.lstrip().startswith(b"{") and not any(part.strip() for part in file)


def _whole(content: bytes, name: str) -> Any:
    try:
        return json.loads(content.removeprefix(_UTF8_BOM).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{name}: not valid JSON: nested too deep") from error


def _list_in(value: Any, name: str, columns: Sequence[str] | None) -> list[Any]:
    """Return the rows of a file's one value: a list; the one list of objects in an object; or the object, if it has a
    column that a row has.
    """
    if isinstance(value, list):
        return value
    lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    if not lists or any(key in value for key in columns or COLUMNS):
        return [value]
    if len(lists) > 1:
        told = ", ".join(f"`{key}`" for key in lists)
        raise DataError(f"{name}: holds several lists of rows, {told}; keep each in a file of its own")
    return value[lists[0]]


def _parse(line: bytes, name: str) -> Row:
    try:
        return _checked(json.loads(line.decode("utf-8")), name)
    except UnicodeDecodeError as error:
        return Row(name, None, RowProblem("not UTF-8", f"byte {error.start} of the line"))
    except json.JSONDecodeError as error:
        return Row(name, None, RowProblem("not valid JSON", f"{error.msg}, column {error.colno}"))
    except RecursionError:
        return Row(name, None, RowProblem("not valid JSON", "nested too deep"))
    except ValueError as error:  # a number of more digits than Python converts
        return Row(name, None, RowProblem("not valid JSON", str(error)))


def _checked(value: Any, name: str) -> Row:
    if isinstance(value, dict):
        return Row(name, value)
    return Row(name, None, RowProblem("not a JSON object", f"found {type(value).__name__}"))
