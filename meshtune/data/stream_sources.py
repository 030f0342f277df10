"""Sources of which nothing is read before it is asked for: files larger than the memory, hub data sets larger than the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshtune.data.readers_arrow import read_stream
from meshtune.data.reading import Reading
from meshtune.data.rows import Row
from meshtune.data.sources import FileSource, HubSource, Source, open_sources
from meshtune.data.token_files import sampled_digest
from meshtune.errors import DataError


def streamed_sources(paths: list[str], split: str, hub_config: str | None, reading: Reading) -> list[Source]:
    """Return the sources that the paths name, none of which is read as a whole; see `open_sources`."""
    return [_streamed(source) for source in open_sources(paths, split, hub_config, reading)]


def _streamed(source: Source) -> Source:
    if isinstance(source, HubSource):
        return _Hub(source.hub_id, source.split, source.config, source.reading)
    assert isinstance(source, FileSource)
    return _File(source.name, source.path, source.reading, source.left_aside)


class _Hub(HubSource):
    """A hub data set whose rows come as they are asked for."""

    def written(self) -> Iterator[Row]:
        return read_stream(self._dataset(), self.name)

    def digest(self) -> str:
        return f"{self.name}:{self.config} {self.reading.digest()}"

    def _dataset(self) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.hub_id, self.config, split=self.split, streaming=True)
        except Exception as error:  # hub, network, split and configuration errors have no common base
            raise DataError(f"{self.name}: cannot be loaded: {error}") from error


@dataclass(frozen=True)
class _File(FileSource):
    """A file of which nothing is read before its turn comes, but a sample that tells whether it has changed."""

    def digest(self) -> str:
        return f"{sampled_digest(self.path)} {self.reading.digest()}"
