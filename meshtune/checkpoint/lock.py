"""One live run to a run folder: a lock that the system lets go of when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from meshtune.checkpoint.writable import unwritable
from meshtune.errors import CheckpointError

LOCK = ".lock"
PATIENCE_S = 15.0
_POLL_S = 0.1
# Beyond what is written into the file: on Windows a locked byte cannot be read by others.
_LOCKED_BYTE = 1 << 20


class RunLock:
    """Held while open. Entering waits up to `patience` seconds for a run that is just ending, then raises
    CheckpointError.

    The file stays in the folder; only the lock on it counts. `supported` is False where the file system has no locks.
    """

    def __init__(self, run: Path, patience: float | None = None):
        self._run, self._patience = run, PATIENCE_S if patience is None else patience
        self._file: IO[str] | None = None
        self.supported = True

    def __enter__(self) -> RunLock:
        path = self._run / LOCK
        try:
            path.touch()
            self._file = path.open("r+", encoding="utf-8")
        except OSError as error:
            raise unwritable(self._run, self._run, error.strerror or str(error)) from error
        try:
            self._acquire()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _acquire(self) -> None:
        assert self._file is not None
        deadline = time.monotonic() + self._patience
        while not self._attempt():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"checkpoint.dir: {self._run} is in use by another run{self._holder()}; wait for it, stop it, or "
                    "name another folder"
                )
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # it only serves the message; a full disk is found out later
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps({"pid": os.getpid(), "host": platform.node()}))
            self._file.flush()

    def _attempt(self) -> bool:
        assert self._file is not None
        try:
            _lock(self._file)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                return False
            self.supported = False
        return True

    def _holder(self) -> str:
        assert self._file is not None
        try:
            self._file.seek(0)
            holder = json.loads(self._file.read())
            return f" (process {holder['pid']} on {holder['host']})"
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def _lock(file: IO[str]) -> None:
    """Raises OSError at once if another open file holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
