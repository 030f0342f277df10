"""Which paths name token files, and the files that they stand for."""

from __future__ import annotations

import glob
from pathlib import Path

from meshtune.errors import DataError

SUFFIX = ".bin"


def is_token_path(path: str) -> bool:
    """Tell whether a path names token files: `x.bin`, a pattern of them, a folder that holds some, or Megatron's prefix `x`."""
    found = Path(path).expanduser()
    if path.endswith(SUFFIX) or (found.is_dir() and any(found.glob(f"*{SUFFIX}"))):
        return True
    return not found.exists() and Path(f"{found}{SUFFIX}").exists() and index_path(Path(f"{found}{SUFFIX}")).exists()


def index_path(path: Path) -> Path:
    """Return where the index of a Megatron file stands."""
    return path.with_suffix(".idx")


def expand(path: str) -> list[tuple[str, Path]]:
    """Return the (name, path) of each file that a path stands for, sorted by name. Raises DataError if there is none."""
    found = Path(path).expanduser()
    if found.is_dir():
        return [(f"{path.rstrip('/')}/{file.name}", file) for file in sorted(found.glob(f"*{SUFFIX}"))]
    if found.is_file():
        return [(path, found)]
    if Path(f"{found}{SUFFIX}").is_file():
        return [(f"{path}{SUFFIX}", Path(f"{found}{SUFFIX}"))]
    matches = sorted(name for name in glob.glob(str(found)) if Path(name).is_file()) if glob.has_magic(path) else []
    if not matches:
        raise DataError(f"{path}: no such file (looked in {Path.cwd()})")
    return [(name, Path(name)) for name in matches]
