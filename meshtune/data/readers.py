"""Readers of one file or data set each. They keep rows as they were written: no column is unified or added.

JSON is read as bytes and cut at line feeds alone, so that neither the locale nor a U+2028 inside a text
matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshtune.data.rows import Row, RowProblem
from meshtune.errors import DataError

USED_COLUMNS = ("messages", "tools", "text")

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_json_lines(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a JSON-lines file, named `file:line` with lines counted from 1; blank lines are no
    rows.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _without_bom(line, name)
            line = line.strip(b" \t\r\n")
            if line:
                yield _parse(line, f"{name}:{number}")


def read_json(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a JSON file: one list of objects (`file:row N`, from 0), else read as JSON lines.

    Raises DataError when a list is not valid JSON: no row of it can be told from another.
    """
    with path.open("rb") as file:
        head = _without_bom(file.read(64), name).lstrip()
    if not head.startswith(b"["):
        yield from read_json_lines(path, name)
        return
    try:
        rows = json.loads(path.read_bytes().removeprefix(_UTF8_BOM).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    for number, value in enumerate(rows):
        yield _checked(value, f"{name}:row {number}")


def read_parquet(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file, named `file:row N`, N from 0. Fields that Parquet filled with null
    are left out.

    Raises DataError when the file is not Parquet or damaged.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [column for column in USED_COLUMNS if column in file.schema_arrow.names] or None
            start = 0
            for batch in file.iter_batches(batch_size=512, columns=columns):
                for number, value in enumerate(batch.to_pylist(), start=start):
                    yield Row(f"{name}:row {number}", _without_nulls(value))
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Parquet: {error}") from error


def read_dataset(dataset: Any, name: str) -> Iterator[Row]:
    """Yield the rows of a loaded `datasets.Dataset`, named `name:row N`, from 0; nulls as in Parquet."""
    columns = [column for column in USED_COLUMNS if column in dataset.column_names]
    for number, value in enumerate(dataset.select_columns(columns) if columns else dataset):
        yield Row(f"{name}:row {number}", _without_nulls(value))


def _without_bom(head: bytes, name: str) -> bytes:
    if head.startswith(_UTF16_BOMS):
        raise DataError(f"{name}: the file is UTF-16; save it as UTF-8")
    return head.removeprefix(_UTF8_BOM)


def _parse(line: bytes, name: str) -> Row:
    try:
        return _checked(json.loads(line.decode("utf-8")), name)
    except UnicodeDecodeError as error:
        return Row(name, None, RowProblem("not UTF-8", f"byte {error.start} of the line"))
    except json.JSONDecodeError as error:
        return Row(name, None, RowProblem("not valid JSON", f"{error.msg}, column {error.colno}"))
    except RecursionError:
        return Row(name, None, RowProblem("not valid JSON", "nested too deep"))


def _checked(value: Any, name: str) -> Row:
    if isinstance(value, dict):
        return Row(name, value)
    return Row(name, None, RowProblem("not a JSON object", f"found {type(value).__name__}"))


def _without_nulls(value: Any) -> Any:
    """Drop null fields at every depth: a columnar file gives every struct all fields of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
