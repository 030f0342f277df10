"""The reader of CSV and TSV files: a header, then rows of text. Quoted cells may hold line feeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtune.data.compressed import data_suffix, open_bytes
from meshtune.data.readers import without_bom
from meshtune.data.rows import Row, RowProblem
from meshtune.errors import DataError

_LONGEST_CELL = 2**31 - 1  # in characters; the library's own limit of 131,072 cuts long texts


def read_csv(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a CSV file (tab-separated where it is a .tsv), named `file:line` by the line they begin in.

    Raises DataError for a header that is not one, and for a quoted cell that is never closed: it takes all rows after it.
    """
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = "\t" if data_suffix(path) == ".tsv" else ","
    with open_bytes(path, name) as file:
        without_bom(file.read(4), name)
    with open_bytes(path, name) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        header = _header(lines, name)
        while (row := _next(lines, header, name)) is not None:
            if row.columns != {}:
                yield row


def _header(lines: Any, name: str) -> list[str]:
    try:
        header: list[str] = next(lines, [])
    except csv.Error as error:
        raise DataError(f"{name}:{lines.line_num}: the header cannot be read: {error}") from error
    header = [cell.strip() for cell in header]
    twice = sorted({cell for cell in header if cell and header.count(cell) > 1})
    if not any(header):
        raise DataError(f"{name}:1: has no header; the first line must name the columns")
    if twice:
        raise DataError(f"{name}:1: the header names {', '.join(twice)} more than once")
    if len(header) == 1 and ";" in header[0]:
        raise DataError(f"{name}:1: the header is {header[0]!r}: cells are separated by `;`; separate them by commas")
    return header


def _next(lines: Any, header: list[str], name: str) -> Row | None:
    """Return the next row, without columns where the line is blank; None at the end."""
    place = f"{name}:{lines.line_num + 1}"
    try:
        cells = next(lines, None)
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise DataError(f"{place}: a quoted cell of this row is never closed") from error
        return Row(place, None, RowProblem("not valid CSV", str(error)))
    if cells is None:
        return None
    if not cells:
        return Row(place, {})
    if len(cells) != len(header):
        return Row(place, None, RowProblem("not as many cells as the header", f"{len(cells)}, not {len(header)}"))
    if not _is_utf8(cells):
        return Row(place, None, RowProblem("not UTF-8"))
    return Row(place, {column: cell for column, cell in zip(header, cells, strict=True) if column})


def _is_utf8(cells: list[str]) -> bool:
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
