"""Files read as bytes, whatever they are compressed with."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from meshtune.errors import DataError

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def data_suffix(path: Path) -> str:
    """Return the suffix that tells what a file holds: `.jsonl` of `a.jsonl.gz`; "" where it has none."""
    stem = path.with_suffix("") if is_compressed(path) else path
    return stem.suffix.lower()


def is_compressed(path: Path) -> bool:
    """Tell, by the name, whether a file is compressed."""
    return path.suffix.lower() in SUFFIXES


@contextmanager
def open_bytes(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file's content. Raises DataError, while it is read inside, where the compressed data is damaged."""
    with _opened(path) as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise DataError(_damaged(name, path, error)) from error
        except OSError as error:
            if not is_compressed(path):
                raise
            raise DataError(_damaged(name, path, error)) from error


def _damaged(name: str, path: Path, error: Exception) -> str:
    return f"{name}: the {path.suffix} data is damaged or cut off: {error}"


def _opened(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".bz2":
        return bz2.open(path, "rb")
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".zst":
        return _zstandard(path)
    return path.open("rb")


def _zstandard(path: Path) -> IO[bytes]:
    import pyarrow  # brought by `datasets`, with a decoder of its own

    class Raw(io.RawIOBase):
        """The stream as the buffered readers of the standard library take it."""

        def __init__(self) -> None:
            self._stream: Any = pyarrow.input_stream(str(path), compression="zstd")

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            part = self._stream.read(len(buffer))
            buffer[: len(part)] = part
            return len(part)

        def close(self) -> None:
            self._stream.close()
            super().close()

    return cast(IO[bytes], io.BufferedReader(Raw(), 1 << 20))
