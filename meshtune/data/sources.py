"""Where rows come from: files and hub data sets, checked before anything is read, read in order, named row by
row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshtune.data import readers
from meshtune.data.rows import Row
from meshtune.errors import DataError

WANTED = "wanted: a .jsonl, .json or .parquet file, a list of such files, or a hub id such as org/name"

_READERS = {
    ".jsonl": readers.read_json_lines,
    ".ndjson": readers.read_json_lines,
    ".json": readers.read_json,
    ".parquet": readers.read_parquet,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Source(Protocol):
    """One origin of rows. `rows()` may be called again; `digest()` changes when a row may have changed."""

    @property
    def name(self) -> str:
        """The path or hub id as the user wrote it."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield the rows in their order, unreadable ones with their problem."""
        ...

    def digest(self) -> str:
        """Return a hash of the content."""
        ...


@dataclass(frozen=True)
class FileSource:
    """A local file that has been found, is not empty and has a suffix that can be read."""

    name: str
    path: Path

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the file; see `readers` for the names that rows get."""
        return _READERS[self.path.suffix.lower()](self.path, self.name)

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class HubSource:
    """One split of a data set that `datasets` loads by id; loaded on first use."""

    def __init__(self, hub_id: str, split: str, config: str | None) -> None:
        self.hub_id, self.split, self.config = hub_id, split, config
        self.name = f"{hub_id}[{split}]"
        self._loaded: Any = None

    def rows(self) -> Iterator[Row]:
        """Yield the rows, named `org/name[split]:row N`, N counted from 0 as `datasets` does."""
        return readers.read_dataset(self._dataset(), self.name)

    def digest(self) -> str:
        """Return the fingerprint that `datasets` gives to the loaded split."""
        return f"{self.name}:{self.config}:{self._dataset()._fingerprint}"

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
    return bool(_HUB_ID.fullmatch(path)) and Path(path).suffix.lower() not in _READERS and not Path(path).exists()


def open_sources(paths: str | list[str], split: str = "train", hub_config: str | None = None) -> list[Source]:
    """Return one source for each path, in order.

    Raises DataError at once, for all paths together, when a file is missing, empty, a folder, a pattern or of
    an unknown kind.
    """
    listed = [paths] if isinstance(paths, str) else list(paths)
    if not listed:
        raise DataError(f"no data file is named; {WANTED}")
    complaints = [complaint for path in listed if (complaint := _complaint(path))]
    if complaints:
        raise DataError("\n".join(complaints))
    return [_source(path, split, hub_config) for path in listed]


def _source(path: str, split: str, hub_config: str | None) -> Source:
    if is_hub_id(path):
        return HubSource(path, split, hub_config)
    return FileSource(path, Path(path).expanduser())


def _complaint(text: str) -> str | None:
    if is_hub_id(text):
        return None
    path = Path(text).expanduser()
    if path.is_dir():
        return f"{text}: is a folder; {WANTED}"
    if not path.exists():
        if any(mark in text for mark in "*?["):
            return f"{text}: patterns are not expanded (the order of files matters); list the files"
        return f"{text}: no such file (looked in {Path.cwd()}); {WANTED}"
    if path.suffix.lower() not in _READERS:
        return f"{text}: the suffix {path.suffix or '(none)'} is unknown; {WANTED}"
    if path.stat().st_size == 0:
        return f"{text}: the file is empty; {WANTED} with at least one row"
    return None
