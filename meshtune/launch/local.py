"""Start ranks on this machine with torch elastic, pass signals on to them, and end as they end.

torch elastic alone kills ranks 30 seconds after a signal, which may be too soon for a checkpoint. So it runs in a thread
of its own, where it handles no signals, and the main thread hands each signal to the ranks, which agree on a step to stop at.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtune.launch.rank import FOLDER, LAUNCHER
from meshtune.launch.rank import exit_codes as rank_exit_codes


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run `python -m meshtune <arguments>` as `nproc` ranks; returns the exit code of the first rank that failed, or 0."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="meshtune-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER], os.environ[LAUNCHER] = folder, str(os.getpid())
        outcome: list[BaseException | None] = []
        agent = threading.Thread(target=_run_agent, args=(nproc, arguments, outcome), daemon=True)
        with _PassedOn(Path(folder)):
            agent.start()
            while agent.is_alive():
                agent.join(0.2)
        return _exit_code(Path(folder), outcome)


def _run_agent(nproc: int, arguments: Sequence[str], outcome: list[BaseException | None]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "meshtune", *arguments)
        outcome.append(None)
    except BaseException as error:
        outcome.append(error)


def _exit_code(folder: Path, outcome: list[Any]) -> int:
    if outcome and outcome[0] is None:
        return 0
    codes = rank_exit_codes(folder)
    told = [code for code in codes if code]
    if told:
        # Ranks that leave on a signal, or on an error they all have, say so; one killed by the agent says nothing.
        return told[0]
    failures = getattr(outcome[0] if outcome else None, "failures", {})
    first = min(failures.values(), key=lambda f: f.timestamp, default=None)
    if first is None:
        print(f"meshtune: the ranks could not be started: {outcome[0] if outcome else 'no outcome'}", file=sys.stderr)
        return 1
    how = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
    print(f"meshtune: rank {first.local_rank} {how}; the other ranks were stopped", file=sys.stderr)
    return 1


class _PassedOn:
    """While open, SIGINT and SIGTERM go to every rank."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._pass_on)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _pass_on(self, signum: int, _frame: object) -> None:
        for file in self._folder.glob("rank-*.pid"):
            try:
                os.kill(int(file.read_text(encoding="utf-8")), signum)
            except (OSError, ValueError):
                continue  # that rank has ended already
