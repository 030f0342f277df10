"""Files that are either the old or the new one, never half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace `path` by `content` in one step; its folder is made where missing.

    A process killed at any instant leaves the previous file or the new one. Raises `OSError` as the file
    system does."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
