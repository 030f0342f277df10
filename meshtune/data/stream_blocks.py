"""Blocks of a stream: so many rows, encoded when their turn comes, kept for the ranks of this node until all have passed them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshtune.data import store
from meshtune.data.dataset import TokenDataset
from meshtune.data.encode_block import EncodedBlock
from meshtune.data.report import DataReport
from meshtune.data.stream_encoding import Place, StreamEncoder
from meshtune.errors import DataError

_POLL_S = 0.02


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


class Builder:
    """Encodes blocks in a thread of its own, the expected one before it is asked for, and puts them into `folder`."""

    def __init__(
        self,
        encoder: StreamEncoder,
        folder: Path,
        report: DataReport,
        told: Callable[[Place, DataReport], None],
    ) -> None:
        """`report` counts what is read; `told` is called with each block's, in the thread, and may refuse it with DataError."""
        self._encoder = encoder
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
        self._encoder.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _submit(self, place: Place) -> Future[Found]:
        if place not in self._work:
            self._work[place] = self._thread.submit(self._build, place)
        return self._work[place]

    def _build(self, place: Place) -> Found:
        pieces = self._encoder.encode(place)
        found = Found(end=not pieces)
        if pieces:
            report = DataReport(max_seq_length=self._report.max_seq_length)
            for piece in pieces:
                report.add(piece.report)
            self._report.add(report)
            self._told(place, report)
            found = Found(self._kept(place, pieces, report) if report.documents else None)
        _write(self._folder / f"{_name(place)}.json", {"end": found.end, "empty": found.documents is None})
        return found

    def _kept(self, place: Place, pieces: Sequence[EncodedBlock], report: DataReport) -> TokenDataset:
        with store.Writer(self._folder / _name(place)) as writer:
            for piece in pieces:
                writer.write(piece.input_ids, piece.supervised, piece.lengths)
            return writer.publish(report)


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
        documents = None if said["empty"] else store.load(self._folder / _name(place), whole=False)
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
