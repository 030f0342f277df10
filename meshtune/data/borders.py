"""Where documents end in a token file without an index: behind each separator. Found once and kept, as a file can be large."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshtune.data.token_files import TokenFile

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First token and number of tokens of each document of a file."""

_CHUNK = 1 << 24  # tokens looked at together
_VERSION = 1


def spans(file: TokenFile, separator: int | None, cache: Path) -> Spans:
    """Return first token and number of tokens of each document. A separator is the last token of its document; tokens behind
    the last one are a document too. Without a separator the file is one document.
    """
    whole = np.array([file.count], dtype=np.int64)
    ends = whole if separator is None else _cached_ends(file, separator, cache)
    if ends.size == 0 or ends[-1] != file.count:
        ends = np.concatenate([ends, whole])
    starts = np.concatenate(([0], ends[:-1]))
    return starts, ends - starts


def _cached_ends(file: TokenFile, separator: int, cache: Path) -> NDArray[np.int64]:
    facts = (_VERSION, file.digest(), file.path.stat().st_mtime_ns, file.dtype.str, file.offset, separator)
    kept = cache / "borders" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.npy"
    try:
        return np.load(kept, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        ends = _ends(file, separator)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs another look at the file next time
        _keep(kept, ends)
    return ends


def _ends(file: TokenFile, separator: int) -> NDArray[np.int64]:
    """Read rather than map: pages of a whole file need not be held."""
    found = []
    for start in range(0, file.count, _CHUNK):
        found.append(np.flatnonzero(file.part(start, _CHUNK) == separator) + (start + 1))
    return np.concatenate(found).astype(np.int64)


def _keep(path: Path, ends: NDArray[np.int64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            np.save(out, ends, allow_pickle=False)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
