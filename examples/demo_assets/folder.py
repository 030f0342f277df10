"""A folder that is made once: it appears only when whole, with a marker that vouches for every file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo_assets.fetch import AssetError, scratch_folder, sha256_of

MARKER = ".complete.json"


def make_once(folder: Path, inputs: Mapping[str, Any], build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Makes `folder` with `build` unless it is whole and was made from the same `inputs`.

    Args:
        folder: where the files end up. One with files and no marker is someone else's and is never replaced.
        inputs: what the content depends on, as JSON values: hashes of sources, options, conversion version.
        build: writes the files into the empty folder that it is given; returns facts to keep, as JSON values.

    Returns: the marker: `inputs`, `facts`, and `files` (name to size and sha256).
    Raises: AssetError if `folder` holds files without a marker; whatever `build` raises.
    """
    marker = _read_marker(folder)
    if marker and marker["inputs"] == inputs and _intact(folder, marker):
        return marker
    if marker is None and folder.exists() and any(folder.iterdir()):
        raise AssetError(f"{folder} holds files that were not made here; name a new or empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, f".{folder.name}.partial-") as scratch:
        made = scratch / "made"
        made.mkdir()
        facts = build(made)
        files = {file.name: _describe(file) for file in sorted(made.iterdir())}
        marker = {"inputs": dict(inputs), "facts": facts, "files": files}
        (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, scratch / "old")
        os.replace(made, folder)
    return marker


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker


def _intact(folder: Path, marker: Mapping[str, Any]) -> bool:
    recorded = marker["files"].items()
    return all((folder / name).is_file() and _describe(folder / name) == file for name, file in recorded)


def _describe(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
