"""Token files as the tools that make them write them, for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_index(
    path: Path, dtype: str, lengths: Sequence[int] | np.ndarray, firsts: Sequence[int] | np.ndarray | None = None
) -> None:
    """Megatron's `.idx`; `firsts` are the first sequence of each document and, last, the number of sequences."""
    counts = np.asarray(lengths, dtype=np.int32)
    offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)[:-1])) * np.dtype(dtype).itemsize
    bounds = np.arange(len(counts) + 1) if firsts is None else np.asarray(firsts)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(counts), len(bounds))
    path.write_bytes(head + counts.tobytes() + offsets.astype("<i8").tobytes() + bounds.astype("<i8").tobytes())


def write_megatron(
    path: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16", firsts: Sequence[int] | None = None
) -> str:
    """`path` (.bin) and the index beside it."""
    write_raw(path, [i for document in documents for i in document], dtype)
    write_index(path.with_suffix(".idx"), dtype, [len(document) for document in documents], firsts)
    return str(path)


def write_raw(path: Path, ids: Sequence[int] | np.ndarray, dtype: str = "uint16") -> str:
    """nanoGPT's: the ids and nothing else."""
    np.asarray(ids).astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    return str(path)


def write_llmc(
    path: Path, ids: Sequence[int], magic: int = 20240520, version: int = 1, count: int | None = None
) -> str:
    """llm.c's: 256 int32, then the ids."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = {20240520: "<u2", 20240801: "<u4"}.get(magic, "<u2")
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return str(path)
