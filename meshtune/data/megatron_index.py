"""The `.idx` beside a Megatron `.bin`: which tokens are a document. Format: `megatron/core/datasets/indexed_dataset.py`.

magic "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document bounds u64
| length of each sequence i32 | byte offset of each sequence i64 | document bounds i64: sequence numbers, the first 0,
the last the number of sequences | where sequences have modes, one i8 each
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.data.borders import Spans
from meshtune.data.token_files import TokenFile
from meshtune.data.token_paths import index_path
from meshtune.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}


def open_indexed(name: str, path: Path, token_dtype: str | None) -> tuple[TokenFile, Spans, list[str]]:
    """Return a file with an index, the documents in it, and what a user should know of them.

    Raises DataError where the index is not Megatron's, contradicts `token_dtype`, or speaks of another file than this.
    """
    index = index_path(path)
    code, sequences, bounds = _head(index, f"{name}: its index {index.name}")
    dtype = np.dtype(_DTYPES[code])
    if token_dtype not in (None, dtype.name):
        raise DataError(f"{name}: its index says {dtype.name}, but data.token_dtype is {token_dtype}; leave it out")
    lengths = _column(index, "<i4", sequences, _HEAD.size)
    offsets = _column(index, "<i8", sequences, _HEAD.size + 4 * sequences)
    firsts = _column(index, "<i8", bounds, _HEAD.size + 12 * sequences)
    file = TokenFile(name, path, dtype, 0, path.stat().st_size // dtype.itemsize, f"{dtype.name}, Megatron index")
    _check(file, lengths, offsets)
    spans, notes = _documents(file, lengths, offsets, firsts)
    return file, spans, notes


def _head(index: Path, where: str) -> tuple[int, int, int]:
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise DataError(f"{where} is not one that Megatron writes (it begins with {head[:9]!r}, not {_MAGIC!r})")
    _, version, code, sequences, bounds = _HEAD.unpack(head)
    if version != 1:
        raise DataError(f"{where} is of version {version}; 1 can be read")
    if code not in _DTYPES:
        kind = _FLOATS.get(code, f"of an unknown kind ({code})")
        raise DataError(f"{where} says that its values are {kind}; token ids are integers")
    needed = _HEAD.size + 12 * sequences + 8 * bounds
    if sequences == 0 or size < needed:
        raise DataError(f"{where} counts {sequences:,} sequences, {needed:,} bytes, but has {size:,}")
    return code, sequences, bounds


def _column(index: Path, dtype: str, count: int, offset: int) -> NDArray[Any]:
    return np.memmap(index, dtype=dtype, mode="r", offset=offset, shape=(count,)) if count else np.zeros(0, dtype=dtype)


def _check(file: TokenFile, lengths: NDArray[Any], offsets: NDArray[Any]) -> None:
    ends = offsets + lengths.astype(np.int64) * file.dtype.itemsize
    wrong = np.flatnonzero((lengths < 0) | (offsets < 0) | (offsets % file.dtype.itemsize != 0))
    if len(wrong):
        raise DataError(
            f"{file.name}: sequence {wrong[0]} of its index begins at byte {offsets[wrong[0]]} and has "
            f"{lengths[wrong[0]]} tokens of {file.dtype.itemsize} bytes; the index is damaged"
        )
    size = file.path.stat().st_size
    if ends.max() > size:
        last = int(ends.argmax())
        raise DataError(
            f"{file.name}: its index needs {ends[last]:,} bytes (sequence {last}), but the file has {size:,}: it is truncated, "
            "or the index is another file's"
        )


def _documents(
    file: TokenFile, lengths: NDArray[Any], offsets: NDArray[Any], firsts: NDArray[Any]
) -> tuple[Spans, list[str]]:
    starts, size = offsets // file.dtype.itemsize, len(lengths)
    if len(firsts) == size + 1 and np.array_equal(firsts, np.arange(size + 1)):
        return (starts.astype(np.int64), lengths.astype(np.int64)), []
    if len(firsts) < 2 or firsts[0] != 0 or firsts[-1] != size or (np.diff(firsts) < 0).any():
        note = f"{file.name}: its index does not say which sequences are a document; each is taken as one"
        return (starts.astype(np.int64), lengths.astype(np.int64)), [note]
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    counts = np.diff(ends[firsts])
    inside = np.ones(size, dtype=bool)
    inside[firsts[:-1][counts > 0]] = False  # sequences that do not begin a document go on where the one before ended
    broken = np.flatnonzero(inside[1:] & (starts[1:] != starts[:-1] + lengths[:-1]) & (lengths[1:] > 0)) + 1
    if len(broken):
        raise DataError(f"{file.name}: sequence {broken[0]} does not stand behind the one before it in its document")
    kept = counts > 0
    return (starts[firsts[:-1][kept]].astype(np.int64), counts[kept]), []
