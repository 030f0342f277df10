"""What a rank started by `launch.local` does for its launcher: say who it is and how it ended, and not outlive it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

FOLDER = "MESHTUNE_LAUNCH_FOLDER"
LAUNCHER = "MESHTUNE_LAUNCHER_PID"


def report_for_duty() -> None:
    """Leave this rank's pid for signals, and end the process when its launcher has died, so that it never writes on alone."""
    folder = os.environ.get(FOLDER)
    if folder is None or "RANK" not in os.environ:
        return
    beside = Path(folder) / f"rank-{os.environ['RANK']}.tmp"
    beside.write_text(str(os.getpid()), encoding="utf-8")
    beside.replace(beside.with_suffix(".pid"))
    if hasattr(os, "getppid") and os.name == "posix":
        threading.Thread(target=_end_with, args=(int(os.environ[LAUNCHER]),), daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.2)
    os._exit(1)


def report_exit(code: int) -> None:
    """Leave this rank's exit code for the launcher."""
    folder = os.environ.get(FOLDER)
    if folder is not None and "RANK" in os.environ and Path(folder).is_dir():
        (Path(folder) / f"rank-{os.environ['RANK']}.exit").write_text(str(code), encoding="utf-8")


def exit_codes(folder: Path) -> list[int]:
    """The exit codes that ranks left, in the order in which they ended."""
    files = sorted(folder.glob("rank-*.exit"), key=lambda file: file.stat().st_mtime_ns)
    return [int(file.read_text(encoding="utf-8") or 1) for file in files]
