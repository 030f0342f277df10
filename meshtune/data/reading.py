"""What lies between a file's rows and a format: the user's own function over rows, and the user's names of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshtune.data.row_function import apply, digest_of
from meshtune.data.rows import Row
from meshtune.data.shapes import columns_of_format

if TYPE_CHECKING:
    from meshtune.data.section import DataSection


@dataclass(frozen=True)
class Reading:
    """How a set's rows are read. `columns` gives the name in the data for each of our names (`{messages: dialog}`); `met`
    gathers our names whose columns have occurred.
    """

    row_format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    row_function: str | None = None
    met: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, section: DataSection) -> Reading:
        """Return what a section asks for."""
        return cls(section.format, section.columns or {}, section.row_function)

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """The columns that are read from files that can be read by column; None: all of them."""
        if self.row_function is not None:
            return None
        ours = columns_of_format(self.row_format)
        return tuple(dict.fromkeys((*ours, *(self.columns[name] for name in ours if name in self.columns))))

    def rows(self, written: Iterable[Row]) -> Iterator[Row]:
        """Yield rows as a format reads them, for rows as they were written. Raises DataError where the function fails."""
        for row in written if self.row_function is None else apply(self.row_function, written):
            yield self._renamed(row) if self.columns and row.columns is not None else row

    def digest(self) -> str:
        """Return what decides the rows that come of rows."""
        function = "" if self.row_function is None else digest_of(self.row_function)
        return repr((sorted(self.columns.items()), function))

    def _renamed(self, row: Row) -> Row:
        written = row.columns or {}
        named = {ours: written[theirs] for ours, theirs in self.columns.items() if theirs in written}
        self.met.update(named)
        taken = {self.columns[ours] for ours in named}
        rest = {name: value for name, value in written.items() if name not in taken and name not in named}
        return Row(row.name, {**named, **rest}, row.problem)
