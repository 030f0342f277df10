"""Blocks of a stream: so many rows, encoded when their turn comes, kept for the ranks of this node until all have passed them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from meshtune.data import store
from meshtune.data.blocks import RowBlock
from meshtune.data.dataset import TokenDataset
from meshtune.data.encode_block import BlockEncoder, EncodedBlock
from meshtune.data.reading import Reading
from meshtune.data.report import DataReport
from meshtune.data.rows import Row
from meshtune.data.sources import Source
from meshtune.errors import DataError

_POLL_S = 0.02

Place = tuple[int, int]
"""An epoch, and the number of a block in it."""


@dataclass(frozen=True)
class Found:
    """A block: its documents, None if no row of it can be used; `end` if the stream has no such block."""

    documents: TokenDataset | None = None
    end: bool = False


class Blocks(Protocol):
    """Gives blocks by their place."""

    def get(self, place: Place) -> Found: ...

    def expect(self, place: Place) -> None: ...

    def release(self, before: Place) -> None: ...

    def close(self) -> None: ...


class Reader:
    """Reads rows on from where it stopped; rows of blocks that are passed over are read, and not encoded."""

    def __init__(self, sources: Sequence[Source], rows: int) -> None:
        self._sources, self._rows = sources, rows
        self._next: Place | None = None
        self._written: Iterator[Row] = iter(())

    @property
    def reading(self) -> Reading:
        """What lies between what is written and the rows."""
        return self._sources[0].reading

    def read(self, place: Place) -> list[Row]:
        """Return the rows of a block, fewer at the stream's end."""
        epoch, number = place
        if self._next is None or self._next[0] != epoch or self._next[1] > number:
            self._written, self._next = chain.from_iterable(source.written() for source in self._sources), (epoch, 0)
        for _ in islice(self._written, (number - self._next[1]) * self._rows):
            pass
        self._next = epoch, number + 1
        return list(islice(self._written, self._rows))


class Builder:
    """Encodes blocks in a thread of its own, the expected one before it is asked for, and puts them into `folder`."""

    def __init__(
        self,
        reader: Reader,
        encoder: BlockEncoder,
        folder: Path,
        report: DataReport,
        told: Callable[[Place, EncodedBlock], None],
    ) -> None:
        """`report` counts what is read; `told` is called with each block, in the thread, and may refuse it with DataError."""
        self._reader, self._encoder = reader, encoder
        self._folder, self._report, self._told = folder, report, told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._work: dict[Place, Future[Found]] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def get(self, place: Place) -> Found:
        """Return a block. Raises DataError for what preparation refuses."""
        try:
            return self._submit(place).result()
        except Exception as error:
            _write(self._folder / "failed", {"error": str(error)})
            raise

    def expect(self, place: Place) -> None:
        """Begin with a block that will be asked for next."""
        self._submit(place)

    def release(self, before: Place) -> None:
        """Remove blocks that every rank of this node has passed."""
        for place in [place for place in self._work if place < before]:
            del self._work[place]
            (self._folder / f"{_name(place)}.json").unlink(missing_ok=True)
            shutil.rmtree(self._folder / _name(place), ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        self._thread.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _submit(self, place: Place) -> Future[Found]:
        if place not in self._work:
            self._work[place] = self._thread.submit(self._build, place)
        return self._work[place]

    def _build(self, place: Place) -> Found:
        rows = self._reader.read(place)
        found = Found(end=True)
        if rows:
            encoded = self._encoder.encode(RowBlock(self._reader.reading, rows))
            self._report.add(encoded.report)
            self._told(place, encoded)
            found = Found(self._kept(place, encoded) if encoded.lengths else None)
        _write(self._folder / f"{_name(place)}.json", {"end": found.end, "empty": found.documents is None})
        return found

    def _kept(self, place: Place, encoded: EncodedBlock) -> TokenDataset:
        with store.Writer(self._folder / _name(place)) as writer:
            writer.write(encoded.input_ids, encoded.supervised, encoded.lengths)
            return writer.publish(encoded.report)


class Follower:
    """Waits for blocks that another rank of this node encodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, place: Place) -> Found:
        """Return a block. Raises DataError where the other rank could not make it."""
        ready = self._folder / f"{_name(place)}.json"
        while not ready.exists():
            if (failed := self._folder / "failed").exists():
                raise DataError(json.loads(failed.read_text(encoding="utf-8"))["error"])
            time.sleep(_POLL_S)
        said = json.loads(ready.read_text(encoding="utf-8"))
        documents = None if said["empty"] else store.load(self._folder / _name(place))
        if documents is None and not said["empty"]:
            raise DataError(f"{self._folder / _name(place)}: a block of the stream was removed while it was needed")
        return Found(documents, said["end"])

    def expect(self, place: Place) -> None:
        """Nothing: who makes the blocks begins with them."""

    def release(self, before: Place) -> None:
        """Nothing: who makes the blocks removes them."""

    def close(self) -> None:
        """Nothing, likewise."""


def _name(place: Place) -> str:
    return f"epoch-{place[0]}-block-{place[1]}"


def _write(path: Path, values: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(values), encoding="utf-8")
    os.replace(beside, path)
