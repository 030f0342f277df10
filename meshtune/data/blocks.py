"""Sources cut into blocks of rows: the unit in which rows are read, encoded and counted, in any process.

Where a block ends depends on the source alone, so that what becomes of it does not depend on who works on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from meshtune.data.compressed import data_suffix, is_compressed, open_bytes
from meshtune.data.readers import rows_of_lines
from meshtune.data.reading import Reading
from meshtune.data.rows import Row
from meshtune.data.sources import FileSource, Source

_BLOCK_BYTES = 1 << 19
_BLOCK_ROWS = 512
_LINES = (".jsonl", ".ndjson")


class Block(Protocol):
    """Some rows of one source, in order; it can be sent to another process."""

    @property
    def reading(self) -> Reading:
        """What lies between what is written and the rows."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield the rows."""
        ...


@dataclass(frozen=True)
class LineBlock:
    """Lines of a file, `first` being the number of the first: as bytes, or where they lie in a file that is not compressed."""

    reading: Reading
    name: str
    first: int
    content: bytes = field(default=b"", repr=False)
    path: Path | None = None
    start: int = 0
    size: int = 0

    def rows(self) -> Iterator[Row]:
        """Yield the rows."""
        return self.reading.rows(rows_of_lines(self._content().split(b"\n"), self.name, self.first))

    def _content(self) -> bytes:
        if self.path is None:
            return self.content
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


@dataclass(frozen=True)
class RowBlock:
    """Rows as they were written."""

    reading: Reading
    written: list[Row]

    def rows(self) -> Iterator[Row]:
        """Yield the rows."""
        return self.reading.rows(self.written)


def blocks_of(source: Source) -> Iterator[Block]:
    """Yield the blocks of a source, reading it once."""
    if isinstance(source, FileSource) and data_suffix(source.path) in _LINES:
        yield from _line_blocks(source)
        return
    written = source.written()
    while rows := list(islice(written, _BLOCK_ROWS)):
        yield RowBlock(source.reading, rows)


def _line_blocks(source: FileSource) -> Iterator[Block]:
    in_place = not is_compressed(source.path)
    with open_bytes(source.path, source.name) as file:
        first, start = 1, 0
        while lines := file.readlines(_BLOCK_BYTES):
            size = sum(map(len, lines))
            if in_place:
                yield LineBlock(source.reading, source.name, first, path=source.path, start=start, size=size)
            else:
                yield LineBlock(source.reading, source.name, first, b"".join(lines))
            first, start = first + len(lines), start + size
