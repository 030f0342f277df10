"""Files that are on the disk, not only in its cache, when a call returns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk. Raises OSError as the file system does."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that for folders (Windows cannot)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
