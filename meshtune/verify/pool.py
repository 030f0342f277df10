"""Rank processes on this machine that are started once and run one job after another.

They are forked from a server that has imported torch and transformers once, where the platform has one; elsewhere each of them
imports anew.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# How long the other ranks may take to notice that one has failed, before their processes are replaced.
_GRACE_S = 3.0
# A run that ends in an error may leave threads of its groups behind; forking a process anew costs little.
_JOBS_OF_A_PROCESS = 6


@dataclass(frozen=True)
class Answer:
    """What a rank's call returned, or the exception that ended it, when (monotonic seconds) and where."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = 0.0


class RankLostError(Exception):
    """A rank gave no answer: its process died, or hung and was ended."""


def first_broken(answers: Sequence[Answer]) -> Answer | None:
    """The cause: a process that ended, or else the first error, since the others fail because their peer has gone."""
    return min((answer for answer in answers if answer.error is not None), key=lambda answer: answer.at, default=None)


class Pool:
    """Use as a context manager; processes start when they are first needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection] | None] = []
        self._served: list[int] = []
        self._jobs = 0
        methods = multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self._context.set_forkserver_preload(["meshtune.verify.preload"])

    def __enter__(self) -> Pool:
        self._folder = tempfile.TemporaryDirectory(prefix="meshtune-verify-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self._workers)):
            self._stop(rank)
        self._folder.cleanup()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Answer]:
        """`function(*arguments)` on each of `ranks` gloo ranks; `function` is a module's own, and all of it is picklable.

        Ranks that have not answered after `timeout` seconds, or shortly after another has failed, are replaced.
        """
        self._jobs += 1
        store = str(self.folder / f"store-{self._jobs}")
        job = pickle.dumps((function, arguments))  # tensors by value, and unpickled where an error is an answer
        answers: dict[int, Answer] = {}
        pending: dict[Connection, int] = {}
        for rank in range(ranks):
            if rank < len(self._served) and self._served[rank] >= _JOBS_OF_A_PROCESS:
                self._stop(rank)
            connection = self._connection(rank)
            connection.send((job, rank, ranks, store, timeout))
            pending[connection] = rank
            self._served[rank] += 1
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in [one for one in pending if one in ready]:
                rank = pending.pop(connection)
                answers[rank] = self._receive(rank, connection)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in pending.values():
            self._stop(rank)
            answers[rank] = Answer(error=RankLostError(f"rank {rank} did not answer in time"), at=time.monotonic())
        return [answers[rank] for rank in range(ranks)]

    def one(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Any:
        """`function(*arguments)` on one rank alone; its result, or its exception raised here."""
        (answer,) = self.run(1, function, *arguments, timeout=timeout)
        if answer.error is not None:
            answer.error.add_note(f"on a rank:\n{answer.trace}")
            raise answer.error
        return answer.value

    def start(self, ranks: int) -> None:
        """Start so many processes now, so that they are ready when they are needed."""
        for rank in range(ranks):
            self._connection(rank)

    def _connection(self, rank: int) -> Connection:
        missing = rank + 1 - len(self._workers)
        self._workers += [None] * missing
        self._served += [0] * missing
        worker = self._workers[rank]
        if worker is None or not worker[0].is_alive():
            self._stop(rank)
            here, there = self._context.Pipe()
            log = str(self.folder / f"rank-{rank}.log")
            process: Any = self._context.Process(target=_serve, args=(there, log), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self._workers[rank] = worker = (process, here)
            self._served[rank] = 0
        return worker[1]

    def _stop(self, rank: int) -> None:
        worker, self._workers[rank] = self._workers[rank], None
        if worker is not None:
            worker[0].kill()
            worker[0].join()
            worker[1].close()

    def _receive(self, rank: int, connection: Connection) -> Answer:
        # From the connection that the job went to: a new process in the place of a dead one knows nothing of the job.
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._stop(rank)
            log = (self.folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace")
            return Answer(error=RankLostError(f"the process of rank {rank} ended without an answer"), trace=log[-2000:])


def _serve(connection: Connection, log: str) -> None:
    """The loop of a rank: a job in, an answer out, until the other end closes. What it prints goes to a file."""
    _quiet(log)
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        before = dict(os.environ)
        # Sent before this rank leaves the world, which makes the ranks that wait for it fail as well.
        connection.send_bytes(_answer(*job))
        _leave()
        os.environ.clear()
        os.environ.update(before)


def _answer(job: bytes, rank: int, ranks: int, store: str, timeout: float) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        function, arguments = pickle.loads(job)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
        value = function(*arguments)
        if dist.is_initialized():
            dist.barrier()  # who leaves the world first must not take it from the others
        return pickle.dumps(Answer(value))
    except BaseException as error:
        return pickle.dumps(Answer(error=_portable(error), trace=traceback.format_exc(), at=time.monotonic()))


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _leave() -> None:
    """Leave the world, and drop torch's cache of meshes, since a later world reuses the groups' names, and every group, whose
    threads go on as long as a mesh in some cycle of objects holds it."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()


def _quiet(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    import warnings

    warnings.filterwarnings("ignore")
