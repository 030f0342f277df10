"""Files of token ids and nothing else: raw arrays, arrays under an llm.c header, and Megatron's with an index beside them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.errors import DataError

_HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
_HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic of llm.c: its version, the dtype of the ids after it
_LARGEST_UINT16_VOCABULARY = 2**16
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class TokenFile:
    """A local file of `count` little-endian ids of `dtype`, `offset` bytes from its start. `form` says in words how it is known;
    `guessed` that the dtype follows from the vocabulary alone.
    """

    name: str
    path: Path
    dtype: np.dtype[Any]
    offset: int
    count: int
    form: str
    guessed: bool = False

    def map(self) -> NDArray[Any]:
        """Return the ids, mapped into memory: nothing is read before it is asked for."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,))

    def part(self, start: int, count: int) -> NDArray[Any]:
        """Return ids `start` to `start + count - 1`, or to the end, as a copy."""
        place = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, dtype=self.dtype, count=min(count, self.count - start), offset=place)

    def digest(self) -> str:
        """Return a hash of the file's length and of 64 KiB at 64 even places: the whole may be terabytes."""
        return sampled_digest(self.path)


def open_plain(name: str, path: Path, token_dtype: str | None, vocabulary: int) -> TokenFile:
    """Return a file without an index: its dtype is that of its header, the one asked for, or the smallest unsigned one that
    holds the vocabulary, as the tools that write such files choose it.

    Raises DataError where its length is not that of its tokens, or it contradicts `token_dtype`.
    """
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=3) if size >= _HEADER_BYTES else np.zeros(3, dtype="<i4")
    if int(header[0]) in _HEADERS:
        return _with_header(name, path, header.tolist(), size, token_dtype)
    fitting = "uint16" if vocabulary <= _LARGEST_UINT16_VOCABULARY else "uint32"
    dtype = np.dtype(token_dtype or fitting).newbyteorder("<")
    if size == 0:
        raise DataError(f"{name}: the file is empty")
    if size % dtype.itemsize:
        raise DataError(f"{name}: {size:,} bytes are no whole number of {dtype.name} tokens; set data.token_dtype")
    return TokenFile(name, path, dtype, 0, size // dtype.itemsize, f"raw {dtype.name}", guessed=token_dtype is None)


def sampled_digest(path: Path) -> str:
    """Return a hash of a file's length and of 64 KiB at 64 even places, the ends among them; of all, if it is small."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    last = max(size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for start in dict.fromkeys(last * k // (_SAMPLES - 1) for k in range(_SAMPLES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _with_header(name: str, path: Path, header: list[int], size: int, token_dtype: str | None) -> TokenFile:
    magic, version, count = header
    wanted, code = _HEADERS[magic]
    dtype = np.dtype(code)
    if version != wanted:
        raise DataError(f"{name}: its header (magic {magic}) is of version {version}; {wanted} can be read")
    if token_dtype not in (None, dtype.name):
        raise DataError(f"{name}: its header says {dtype.name}, but data.token_dtype is {token_dtype}; leave it out")
    if count < 1 or size != _HEADER_BYTES + count * dtype.itemsize:
        needed = _HEADER_BYTES + count * dtype.itemsize
        raise DataError(f"{name}: its header counts {count:,} tokens, {needed:,} bytes, but the file has {size:,}")
    return TokenFile(name, path, dtype, _HEADER_BYTES, count, f"{dtype.name}, llm.c header")
