"""Which format the rows of some sources have: as named, or by the columns of their first rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from meshtune.data.rows import LEFT_OUT, Row
from meshtune.data.shapes import CONVERSATIONAL, SHAPES, shapes_of
from meshtune.data.sources import Source
from meshtune.errors import DataError

_FIRST_ROWS = 100


def detect_format(sources: Sequence[Source], wanted: str) -> str:
    """Return the format of all sources, `wanted` unless that is `auto`, looking at each source's first rows.

    Under `auto` the first of `shapes.SHAPES` is returned that some first row has; rows of other conversational formats
    may stand beside it.

    Raises DataError naming the source, the columns wanted and the columns found when a source has other columns; naming
    the row when it has the columns of two formats; naming two rows when what they hold cannot stand in one set.
    """
    seen: dict[str, str] = {}
    for source in sources:
        rows = [row for row in islice(_kept(source), _FIRST_ROWS) if row.columns is not None]
        found = list(dict.fromkeys(name for row in rows for name in row.columns or ()))
        here = _named(wanted, found) if wanted != "auto" else _by_columns(rows)
        if not here and rows:
            raise DataError(f"{source.name}: {_misfit(source, wanted, found)}")
        for name, row_name in here.items():
            seen.setdefault(name, row_name)
    if not seen:
        raise DataError(f"none of the first rows of {', '.join(s.name for s in sources)} can be read{_why(sources)}")
    _check_together(seen)
    return next(name for name in SHAPES if name in seen)


def ambiguous(found: Sequence[str]) -> str:
    """Return what is said of a row that has the columns of several formats."""
    told = " and of ".join(f"`{name}` ({_columns(name)})" for name in found)
    return f"has the columns of {told}: name the one that is meant with data.format"


def _named(wanted: str, found: Sequence[str]) -> dict[str, str]:
    return {wanted: ""} if all(name in found for name in SHAPES[wanted].required) else {}


def _by_columns(rows: Iterable[Row]) -> dict[str, str]:
    """Return each format that some row has, with the name of the first such row; `text` only where there is no other."""
    seen: dict[str, str] = {}
    for row in rows:
        shapes = shapes_of(row.columns or {})
        if len(shapes) > 1:
            raise DataError(f"{row.name}: {ambiguous(shapes)}")
        for name in shapes:
            seen.setdefault(name, row.name)
    return seen if len(seen) < 2 else {name: row for name, row in seen.items() if name != "text"}


def _check_together(seen: dict[str, str]) -> None:
    """Conversations of all forms unite; what they, plain texts and token ids are learnt by differs."""
    kinds = {("messages" if name in CONVERSATIONAL else name): (name, row) for name, row in reversed(seen.items())}
    if len(kinds) > 1:
        told = ", ".join(f"`{name}` at {row}" for name, row in reversed(kinds.values()))
        raise DataError(
            f"different formats in one set: {told}; name the one that all rows have with data.format, or give each file a "
            "format of its own"
        )


def _misfit(source: Source, wanted: str, found: Sequence[str]) -> str:
    renamed = source.reading.columns
    if wanted == "auto":
        choices = " or ".join(_columns(name, renamed) for name in SHAPES)
    else:
        choices = f"a column {' and '.join(_theirs(name, renamed) for name in SHAPES[wanted].required)}"
    told = ", ".join(f"`{name}`" for name in found)
    hint = f"; data.columns gives columns their names here, such as {_example(wanted, found)}"
    others = [name for name in shapes_of(dict.fromkeys(found, 1)) if name != wanted]
    if wanted != "auto" and others:
        hint = f"; these are columns of `{others[0]}`: name it with data.format{hint}"
    return f"wanted {choices}, found {told}{hint}"


def _example(wanted: str, found: Sequence[str]) -> str:
    ours = SHAPES["messages" if wanted == "auto" else wanted].required[0]
    return f"{{{ours}: {found[0] if found else 'theirs'}}}"


def _columns(row_format: str, renamed: Mapping[str, str] | None = None) -> str:
    return " with ".join(_theirs(name, renamed or {}) for name in SHAPES[row_format].required)


def _theirs(name: str, renamed: Mapping[str, str]) -> str:
    return f"`{renamed[name]}` (for `{name}`, by data.columns)" if name in renamed else f"`{name}`"


def _kept(source: Source) -> Iterator[Row]:
    return (row for row in source.rows() if row.problem != LEFT_OUT)


def _why(sources: Sequence[Source]) -> str:
    row = next((row for source in sources for row in islice(_kept(source), 1)), None)
    if row is None or row.problem is None:
        return ": they hold no row"
    return f": {row.name}: {row.problem.reason} ({row.problem.detail})"
