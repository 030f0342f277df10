"""What torch.distributed.checkpoint writes and reads for us, without the pickle in which it keeps its table of contents.

`tensors.json` says which box of which tensor lies where in which file; it is all that is read of a checkpoint beside its
manifest and the tensors. `.metadata`, torch's own table, is written for torch's tools, and never read.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshtune.checkpoint.checksums import Summed
from meshtune.checkpoint.durable import write_durably
from meshtune.config.inside import inside

TENSORS = "tensors.json"


class _SummedFiles(FileSystem):
    """Takes the checksum of each file that is written, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield (summed := Summed(stream))
        self.checksums[Path(path).name] = summed.checksum


class Writer(dcp.FileSystemWriter):
    """Writes tensors as torch does, and `tensors.json` beside them. `checksums` are those of the files of tensors that this
    rank has written, by name."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=True)
        self._folder = folder
        self.fs = self._files = _SummedFiles()

    @property
    def checksums(self) -> dict[str, str]:
        return {name: value for name, value in self._files.checksums.items() if name.endswith(DEFAULT_SUFFIX)}

    def storage_meta(self) -> StorageMeta:
        """Nothing that would make two checkpoints of one state differ."""
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {name: _entry(name, stored, places) for name, stored in metadata.state_dict_metadata.items()}
        write_durably(self._folder / TENSORS, json.dumps(tensors, separators=(",", ":")) + "\n")


class Reader(dcp.FileSystemReader):
    """Reads what `Writer` has written. Nothing in a file is run or called, whoever wrote it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Raises ValueError if `tensors.json` is damaged, names a file elsewhere, or leaves a part of a tensor out."""
        file = self._folder / TENSORS
        tensors = json.loads(file.read_text(encoding="utf-8"))
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        sizes = _Sizes(self._folder)
        try:
            for name, entry in tensors.items():
                stored[name] = _metadata(name, entry)
                places.update(_places(sizes, name, entry))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        return Metadata(stored, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """torch's own, which builds tensors and nothing else (`weights_only`)."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise ValueError("one of its files holds something else than tensors, which is not read") from error


def _entry(name: str, stored: Any, places: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{name} is not a tensor")
    chunks = []
    for chunk in stored.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            {
                "offset": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": place.relative_path,
                "start": place.offset,
                "length": place.length,
            }
        )
    return {"dtype": str(stored.properties.dtype).removeprefix("torch."), "shape": list(stored.size), "chunks": chunks}


def _metadata(name: str, entry: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype, shape = getattr(torch, entry["dtype"], None), torch.Size(entry["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has dtype {entry['dtype']!r}, which is none of torch's")
    chunks = [ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["shape"])) for c in entry["chunks"]]
    for chunk in chunks:
        bounds = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in bounds):
            raise ValueError(
                f"{name} of shape {tuple(shape)} cannot hold {tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
            )
    held = sum(math.prod(chunk.sizes) for chunk in chunks)
    if held != math.prod(shape):
        raise ValueError(f"{name} has {math.prod(shape):,} elements, of which {held:,} are in its files")
    return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


def _places(sizes: _Sizes, name: str, entry: Mapping[str, Any]) -> dict[MetadataIndex, _StorageInfo]:
    places = {}
    for chunk in entry["chunks"]:
        file, start, length = chunk["file"], int(chunk["start"]), int(chunk["length"])
        if start < 0 or length < 0 or start + length > sizes[file]:
            raise ValueError(f"{name} should lie at bytes {start:,} to {start + length:,} of {file}, which has no such")
        places[MetadataIndex(name, torch.Size(chunk["offset"]))] = _StorageInfo(file, start, length)
    return places


class _Sizes(dict[str, int]):
    """Bytes of each file of a folder, -1 of one that is not there, looked up once. Raises ValueError for one elsewhere."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> int:
        file = inside(self._folder, name, links=False)
        self[name] = file.stat().st_size if file.is_file() else -1
        return self[name]
