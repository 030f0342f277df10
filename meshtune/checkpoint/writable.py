"""Whether a run folder could be written, asked of the system without writing anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from meshtune.errors import CheckpointError


def refuse_unwritable(run: Path) -> None:
    """Raises CheckpointError if `run`, its checkpoints or its metrics could not be written; where a system cannot say that
    beforehand (Windows, some network disks), they are found out when they are."""
    if os.name != "posix":
        return
    for path in (run, run / "checkpoints", run / "metrics.jsonl"):
        try:
            reason = _reason(path)
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is not None:
            raise unwritable(run, path, reason)


def unwritable(run: Path, path: Path, reason: str) -> CheckpointError:
    """The error that tells that `path` of the run folder `run` cannot be written."""
    what = f"the run folder {run}" if path == run else f"{path} in the run folder"
    return CheckpointError(f"checkpoint.dir: {what} cannot be written ({reason}); name another")


def _reason(path: Path) -> str | None:
    """Of what is there, or else of the folder in which it would be made."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if there != path.absolute() and not there.is_dir():
        return os.strerror(errno.ENOTDIR)
    mode = os.W_OK | os.X_OK if there.is_dir() else os.W_OK
    if os.access(there, mode, effective_ids=os.access in os.supports_effective_ids):
        return None
    return os.strerror(errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES)
