"""A run folder's checkpoints on disk: which are complete, which is newest, which may go.

checkpoints/step-12/                complete: has a manifest, and every file has the size that the manifest says
checkpoints/best.json               names the best of them, if the recipe says what is best
checkpoints/.step-18.x.incomplete/  being written, or left by a process that was killed; never read
checkpoints/.step-24.superseded/    complete, of a course that was given up by resuming from an earlier step; never read
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtune.checkpoint.checksums import CHECKSUMS, checksum_of, is_whole, sealed
from meshtune.checkpoint.durable import sync_folder, write_durably
from meshtune.config.inside import inside
from meshtune.errors import CheckpointError
from meshtune.observe.atomic import write_atomically

MANIFEST = "manifest.json"
BEST = "best.json"
_FORMAT = 2


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint and what its manifest says."""

    path: Path
    step: int
    manifest: dict[str, Any]


def survey(run: Path, known: Mapping[Path, str] | None = None) -> tuple[list[Complete], list[str]]:
    """The complete checkpoints of a run folder, oldest first, and why others that bear a checkpoint's name are not.

    `known` are those whose files have been read and found damaged, with the reason.
    """
    complete, damaged = [], []
    for path in (run / "checkpoints").glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name):
            try:
                complete.append(read(path, known))
            except CheckpointError as error:
                damaged.append(str(error))
    return sorted(complete, key=lambda c: c.step), sorted(damaged)


@dataclass(frozen=True)
class Best:
    """The checkpoint of the step whose validation had the best `value` of `metric`."""

    step: int
    metric: str
    value: float


def checkpoints(run: Path) -> list[Complete]:
    """The complete checkpoints of a run folder, oldest first."""
    return survey(run)[0]


def newest(run: Path, known: Mapping[Path, str] | None = None) -> Complete | None:
    return next(reversed(survey(run, known)[0]), None)


def read(path: Path, known: Mapping[Path, str] | None = None) -> Complete:
    """The checkpoint at `path`. Raises CheckpointError if it is not complete, or `known` to be damaged.

    What its files hold is not looked at: `checksums.verify` does that.
    """
    file = path / MANIFEST
    if known and path in known:
        raise CheckpointError(known[path])
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it has no readable {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is not a complete checkpoint: {reason}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {file} is not JSON: {error}") from error
    if isinstance(manifest, dict) and not is_whole(manifest):
        raise CheckpointError(f"{path} is damaged: {MANIFEST} does not hold what was written")
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{path} has checkpoint format {found!r}; this version reads {_FORMAT}")
    try:
        for name, size in manifest["files"].items():
            _check_member(path, name, size)
        return Complete(path, int(manifest["step"]), manifest)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {file} is damaged: {error}") from error


def _check_member(path: Path, name: str, size: int) -> None:
    """Raises ValueError for a name that leads out of the folder, CheckpointError for a file that is not as it was written."""
    member = inside(path, name, links=False)
    actual = member.stat().st_size if member.is_file() else None
    if actual != size:
        state = "is missing" if actual is None else f"has {actual:,} bytes"
        raise CheckpointError(f"{path} is not a complete checkpoint: {name} {state}, its manifest says {size:,} bytes")


def path_of(run: Path, step: int) -> Path:
    """Where the complete checkpoint of a step is, or will be."""
    return run / "checkpoints" / f"step-{step}"


def begin(run: Path, step: int) -> Path:
    """A new, empty folder to write a checkpoint into. No process of an earlier run knows its name."""
    beside = run / "checkpoints" / f".step-{step}.{uuid.uuid4().hex[:8]}.incomplete"
    beside.mkdir(parents=True)
    return beside


def publish(beside: Path, step: int, facts: dict[str, Any], checksums: Mapping[str, str] | None = None) -> Path:
    """Write the manifest, the last file of a checkpoint, and give the folder its name.

    All of it is on the disk when this returns. A folder of that name, from before a resume, makes room. Files whose checksums
    nobody took while they were written are read again.
    """
    known, files = checksums or {}, {}
    for file in sorted(beside.rglob("*")):
        if file.is_file():
            files[file.relative_to(beside).as_posix()] = file
    manifest = {
        "format": _FORMAT,
        "step": step,
        **facts,
        "files": {name: file.stat().st_size for name, file in files.items()},
        CHECKSUMS: {name: known.get(name) or checksum_of(file) for name, file in files.items()},
    }
    write_durably(beside / MANIFEST, json.dumps(sealed(manifest), indent=2) + "\n")
    sync_folder(beside)
    final = path_of(beside.parent.parent, step)
    old = beside.with_name(f".step-{step}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    beside.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def discard(beside: Path) -> None:
    """Remove what a failed attempt has written, so that its room is free again. Of a link, the link."""
    if beside.is_symlink():
        beside.unlink()
    else:
        shutil.rmtree(beside, ignore_errors=True)


def sweep(run: Path) -> None:
    """Remove what a killed process left half-written. A complete old folder whose successor never came is put back.

    Only for who holds the run folder's lock.
    """
    for left in run.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    for old in (run / "checkpoints").glob(".step-*.old"):
        final = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not final.exists():
            old.rename(final)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for left in (run / "checkpoints").glob(".step-*.incomplete"):
        discard(left)
    for left in (run / "checkpoints").glob(f".{BEST}.*.tmp"):
        left.unlink(missing_ok=True)


def set_aside(run: Path, step: int) -> list[Path]:
    """Rename complete checkpoints beyond `step`, whose course is given up, so that none is newest, or in the way."""
    moved = []
    for later in checkpoints(run):
        if later.step > step:
            aside = later.path.with_name(f".{later.path.name}.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            later.path.rename(aside)
            moved.append(aside)
    return moved


def retain(run: Path, keep: int | None, best: Best | None = None) -> None:
    """Remove the oldest complete checkpoints beyond `keep`, but not the best one, which `best.json` then names.

    Only ever called when a newer one is complete.
    """
    point_to(run, best)
    if keep is None:
        return
    for old in checkpoints(run)[:-keep]:
        if best is not None and old.step == best.step:
            continue
        doomed = old.path.with_name(f".{old.path.name}.incomplete")
        discard(doomed)
        old.path.rename(doomed)
        discard(doomed)


def best(run: Path) -> Best | None:
    """What `checkpoints/best.json` names; None without such a file. Raises CheckpointError if it is damaged."""
    file = run / "checkpoints" / BEST
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Best(int(values["step"]), str(values["metric"]), float(values["value"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def point_to(run: Path, best: Best | None) -> None:
    """Let `checkpoints/best.json` name the best checkpoint; without one there is no such file."""
    file = run / "checkpoints" / BEST
    if best is None:
        file.unlink(missing_ok=True)
        return
    values = {"step": best.step, "path": path_of(run, best.step).name, "metric": best.metric, "value": best.value}
    write_atomically(file, (json.dumps(values, indent=2) + "\n").encode())
