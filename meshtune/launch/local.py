"""Start ranks on this machine with torch elastic, pass signals on to them, and end as they end.

torch elastic alone kills ranks 30 seconds after a signal, which may be too soon for a checkpoint. So it runs in a
thread of its own, where it handles no signals, and the main thread hands each signal to the ranks, which agree on a
step to stop at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from meshtune.launch.rank import FOLDER, LAUNCHER, ended

_PATIENCE = 3
"""So many signals of one kind end the ranks at once."""

_GRACE_S = 15.0
"""How long the other ranks have when one has failed, before they are killed: to say what they know, and no longer, since a
rank that waits for a dead one would wait for ever. torch elastic alone gives them 30 seconds."""


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run `python -m meshtune <arguments>` as `nproc` ranks. Returns 0, or the exit code of the first that failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="meshtune-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER], os.environ[LAUNCHER] = folder, str(os.getpid())
        outcome: list[BaseException | None] = []
        agent = threading.Thread(target=_run_agent, args=(nproc, arguments, folder, outcome), daemon=True)
        ranks = _Ranks(Path(folder))
        with _PassedOn(ranks):
            agent.start()
            while agent.is_alive():
                agent.join(0.2)
                ranks.end_with_the_first_failure()
        failure = outcome[0] if outcome else RuntimeError("the agent ended without a word")
        return _exit_code(Path(folder), failure, ranks.killed)


def _run_agent(nproc: int, arguments: Sequence[str], folder: str, outcome: list[BaseException | None]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Importing torch sets the levels of its loggers. What is worth saying of the ranks, `_exit_code` says.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "meshtune", *arguments)
        outcome.append(None)
    except BaseException as error:
        outcome.append(error)


def _exit_code(folder: Path, failure: BaseException | None, killed: Set[int] = frozenset()) -> int:
    """The launcher's exit code. Says on standard error what no rank could say. Of the ranks that the launcher has `killed` for
    another's failure nothing is to be said."""
    if failure is None:
        return 0
    failures: dict[int, Any] = getattr(failure, "failures", {})
    ends = [end for end in ended(folder) if end.code]
    reported = {end.rank for end in ends}
    died = [
        _death(rank, f.exitcode)
        for rank, f in failures.items()
        if rank not in killed and (f.exitcode < 0 or rank not in reported)
    ]
    # An error of a rank comes first; then a death; only then what the others did when they were ended for it.
    told = next((end for end in ends if end.code < 128 and not end.untold), None)
    if told is None and not died and ends:
        told = ends[0]
        if told.untold:
            _say(told.untold)
    if told is not None:
        return told.code
    if died:
        _say(f"{' and '.join(died)}; the other ranks were stopped")
    else:
        _say(f"the ranks could not be started: {type(failure).__name__}: {failure}")
    return 1


def _death(rank: int, exitcode: int) -> str:
    return (
        f"rank {rank} was killed by signal {-exitcode}"
        if exitcode < 0
        else f"rank {rank} ended with exit code {exitcode}"
    )


def _say(text: str) -> None:
    print(f"meshtune: {text}", file=sys.stderr, flush=True)


class _Ranks:
    """The processes of the ranks, which have left their pids in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._failed_at: float | None = None
        self.killed: set[int] = set()

    def send(self, signum: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):  # a rank that has ended already
                os.kill(pid, signum)

    def kill(self) -> None:
        self.send(getattr(signal, "SIGKILL", signal.SIGTERM))

    def pids(self) -> list[int]:
        return [int(file.read_text(encoding="utf-8")) for file in self._folder.glob("rank-*.pid")]

    def end_with_the_first_failure(self) -> None:
        """To be called again and again: kills what is left some time after a rank has failed."""
        if self._failed_at is None:
            self._failed_at = time.monotonic() if self._one_has_failed() else None
        elif time.monotonic() - self._failed_at > _GRACE_S:
            self.killed.update(rank for rank, exists in self._silent().items() if exists)
            self.kill()

    def _one_has_failed(self) -> bool:
        if any(0 < end.code < 128 for end in ended(self._folder)):
            return True
        return not all(self._silent().values())

    def _silent(self) -> dict[int, bool]:
        """Whether each rank exists that has not said how it ended."""
        if os.name != "posix":  # where no signal can be sent that does nothing
            return {}
        done = {end.rank for end in ended(self._folder)}
        running = {int(file.stem.removeprefix("rank-")): file for file in self._folder.glob("rank-*.pid")}
        return {
            rank: _exists(int(file.read_text(encoding="utf-8"))) for rank, file in running.items() if rank not in done
        }


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class _PassedOn:
    """While open, SIGINT and SIGTERM go to every rank, which saves and leaves.

    Before any rank is there, and on the third of a kind, they end everything at once.
    """

    def __init__(self, ranks: _Ranks):
        self._ranks = ranks
        self._previous: dict[int, Any] = {}
        self._counts = {signal.SIGINT: 0, signal.SIGTERM: 0}

    def __enter__(self) -> None:
        for signum in self._counts:
            self._previous[signum] = signal.signal(signum, self._pass_on)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _pass_on(self, signum: int, _frame: object) -> None:
        self._counts[signal.Signals(signum)] += 1
        enough = self._counts[signal.Signals(signum)] >= _PATIENCE
        if enough:
            self._ranks.kill()
        elif os.name == "posix":  # Windows hands Ctrl-C to every process of a console itself
            self._ranks.send(signum)
        if enough or not self._ranks.pids():
            raise SystemExit(128 + signum)
