"""What a rank does for the launcher that started it: say who it is and how it ended, and not outlive it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESHTUNE_LAUNCH_FOLDER"
LAUNCHER = "MESHTUNE_LAUNCHER_PID"
_POLL_S = 0.2


@dataclass(frozen=True)
class Ended:
    """How a rank says that it ended: its exit code, and why, where it has not said so to the user itself."""

    rank: int
    code: int
    untold: str = ""


def report_for_duty() -> None:
    """Leave this rank's pid for signals, and end the process when its launcher has died: it never writes on alone.

    That holds for `meshtune train --nproc` and for torchrun, on systems where a process learns that its parent is gone
    (not Windows). Does nothing in a process that is no rank.
    """
    folder = _launch_folder()
    if folder is not None:
        beside = folder / f"rank-{os.environ['RANK']}.tmp"
        beside.write_text(str(os.getpid()), encoding="utf-8")
        beside.replace(beside.with_suffix(".pid"))
    if os.name == "posix" and (folder is not None or "TORCHELASTIC_RUN_ID" in os.environ):
        launcher = int(os.environ[LAUNCHER]) if folder is not None else os.getppid()
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    os._exit(1)


def report_exit(code: int, untold: str = "") -> None:
    """Leave this rank's exit code for the launcher, and a reason that the launcher shall tell if it knows no better."""
    folder = _launch_folder()
    if folder is not None:
        values = json.dumps({"rank": int(os.environ["RANK"]), "code": code, "untold": untold})
        with contextlib.suppress(OSError):
            (folder / f"rank-{os.environ['RANK']}.exit").write_text(values, encoding="utf-8")


def first_to_say(text: str) -> bool | None:
    """Whether this rank is the first of its launcher's to say `text`; None without a launcher, who alone can know."""
    folder = _launch_folder()
    if folder is None:
        return None
    try:
        (folder / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except OSError:
        return False
    return True


def ended(folder: Path) -> list[Ended]:
    """What ranks left of how they ended, first things first."""
    files = sorted(folder.glob("rank-*.exit"), key=lambda file: file.stat().st_mtime_ns)
    found = []
    for file in files:
        with contextlib.suppress(ValueError, TypeError):  # its rank was killed while writing it
            found.append(Ended(**json.loads(file.read_text(encoding="utf-8"))))
    return found


def _launch_folder() -> Path | None:
    name = os.environ.get(FOLDER)
    return Path(name) if name is not None and "RANK" in os.environ and Path(name).is_dir() else None
