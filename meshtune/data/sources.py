"""Where rows come from: files and hub data sets, checked before anything is read, read in order, named row by
row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshtune.data.compressed import data_suffix
from meshtune.data.paths import READERS, WANTED, expand, is_data_file
from meshtune.data.readers_arrow import read_dataset
from meshtune.data.reading import Reading
from meshtune.data.rows import Row
from meshtune.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Source(Protocol):
    """One origin of rows. `rows()` may be called again; `digest()` changes when a row may have changed."""

    @property
    def name(self) -> str:
        """The path or hub id as the user wrote it; a file of a folder or pattern, its own path."""
        ...

    @property
    def reading(self) -> Reading:
        """What lies between what is written and the rows."""
        ...

    def written(self) -> Iterator[Row]:
        """Yield the rows in their order as they were written, unreadable ones with their problem."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield the rows in their order, as a format reads them."""
        ...

    def digest(self) -> str:
        """Return a hash of the content."""
        ...


@dataclass(frozen=True)
class FileSource:
    """A local file that has been found, is not empty and has a suffix that can be read."""

    name: str
    path: Path
    reading: Reading = field(default_factory=Reading)
    left_aside: tuple[str, ...] = ()
    """Files of the same folder that are no data, told of by its first file."""

    def written(self) -> Iterator[Row]:
        """Yield the rows of the file; see `readers` for the names that rows get."""
        return READERS[data_suffix(self.path)](self.path, self.name, self.reading.wanted)

    def rows(self) -> Iterator[Row]:
        """Yield the rows as a format reads them."""
        return self.reading.rows(self.written())

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes, and what decides how they are read."""
        with self.path.open("rb") as file:
            return f"{hashlib.file_digest(file, 'sha256').hexdigest()} {self.reading.digest()}"


class HubSource:
    """One split of a data set that `datasets` loads by id; loaded on first use."""

    def __init__(self, hub_id: str, split: str, config: str | None, reading: Reading | None = None) -> None:
        self.hub_id, self.split, self.config = hub_id, split, config
        self.reading = Reading() if reading is None else reading
        self.name = f"{hub_id}[{split}]"
        self._loaded: Any = None

    def written(self) -> Iterator[Row]:
        """Yield the rows, named `org/name[split]:row N`, N counted from 0 as `datasets` does."""
        return read_dataset(self._dataset(), self.name, self.reading.wanted)

    def rows(self) -> Iterator[Row]:
        """Yield the rows as a format reads them."""
        return self.reading.rows(self.written())

    def digest(self) -> str:
        """Return the fingerprint that `datasets` gives to the loaded split."""
        return f"{self.name}:{self.config}:{self._dataset()._fingerprint} {self.reading.digest()}"

    def _dataset(self) -> Any:
        if self._loaded is None:
            import datasets

            try:
                self._loaded = datasets.load_dataset(self.hub_id, self.config, split=self.split)
            except Exception as error:  # hub, network, split and configuration errors have no common base
                raise DataError(f"{self.name}: cannot be loaded: {error}") from error
        return self._loaded


def is_hub_id(path: str) -> bool:
    """Tell whether a path names a hub data set: `org/name`, no such local path, no data suffix."""
    return bool(_HUB_ID.fullmatch(path)) and not is_data_file(Path(path)) and not Path(path).exists()


def open_sources(
    paths: str | list[str], split: str = "train", hub_config: str | None = None, reading: Reading | None = None
) -> list[Source]:
    """Return the sources that the paths name, in order: one for each file and hub id.

    Raises DataError at once, for all paths together, when a file is missing, empty or of an unknown kind, a folder or
    pattern holds none.
    """
    reading = Reading() if reading is None else reading
    listed = [paths] if isinstance(paths, str) else list(paths)
    if not listed:
        raise DataError(f"no data file is named; {WANTED}")
    sources: list[Source] = []
    complaints = []
    for path in listed:
        if is_hub_id(path):
            sources.append(HubSource(path, split, hub_config, reading))
            continue
        try:
            found = expand(path)
            asides = [tuple(found.left_aside), *[()] * len(found.files)]
            sources += [
                FileSource(name, file, reading, aside) for (name, file), aside in zip(found.files, asides, strict=False)
            ]
        except DataError as complaint:
            complaints.append(str(complaint))
    if complaints:
        raise DataError("\n".join(complaints))
    return sources
