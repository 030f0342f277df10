"""A run folder's checkpoints on disk: which are complete, which is newest, which may go.

    checkpoints/step-12/             complete: has a manifest, and every file has the size that the manifest says
    checkpoints/.step-18.incomplete/ being written, or left by a process that was killed; never read
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint and what its manifest says."""

    path: Path
    step: int
    manifest: dict[str, Any]


def checkpoints(run: Path) -> list[Complete]:
    """The complete checkpoints of a run folder, oldest first."""
    found = []
    for path in (run / "checkpoints").glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name):
            try:
                found.append(read(path))
            except CheckpointError:
                continue
    return sorted(found, key=lambda c: c.step)


def newest(run: Path) -> Complete | None:
    return next(reversed(checkpoints(run)), None)


def damaged(run: Path) -> list[tuple[Path, str]]:
    """Folders that look like checkpoints but are not complete, and why."""
    found = []
    for path in sorted((run / "checkpoints").glob("step-*")):
        try:
            read(path)
        except CheckpointError as error:
            found.append((path, str(error)))
    return found


def read(path: Path) -> Complete:
    """The checkpoint at `path`. Raises CheckpointError if it is not complete."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no readable {MANIFEST}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {file} is not JSON: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {manifest.get('format')!r}; this version reads {_FORMAT}")
    for name, size in manifest["files"].items():
        member = path / name
        actual = member.stat().st_size if member.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,} bytes"
            raise CheckpointError(f"{path} is not a complete checkpoint: {name} {state}, its manifest says {size:,} bytes")
    return Complete(path, int(manifest["step"]), manifest)


def write_manifest(folder: Path, step: int, facts: dict[str, Any]) -> None:
    """The last file of a checkpoint: what is in it, and the size of every file."""
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = {"format": _FORMAT, "step": step, **facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def incomplete(run: Path, step: int) -> Path:
    return run / "checkpoints" / f".step-{step}.incomplete"


def publish(beside: Path, step: int) -> Path:
    """Give a finished folder its name. A folder of that name, from before a resume, makes room first."""
    final = beside.with_name(f"step-{step}")
    if final.exists():
        old = beside.with_name(f".step-{step}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        beside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(final)
    return final


def sweep(run: Path) -> None:
    """Remove what a killed process left half-written. A complete old folder whose successor never came is put back."""
    for old in (run / "checkpoints").glob(".step-*.old"):
        final = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not final.exists():
            old.rename(final)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for left in (run / "checkpoints").glob(".step-*.incomplete"):
        shutil.rmtree(left, ignore_errors=True)


def retain(run: Path, keep: int | None) -> None:
    """Remove the oldest complete checkpoints beyond `keep`; only ever called when a newer one is complete."""
    if keep is None:
        return
    for old in checkpoints(run)[:-keep]:
        doomed = old.path.with_name(f".{old.path.name}.incomplete")
        old.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
