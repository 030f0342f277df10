"""A pool of rank processes that lives for a whole pytest session, because importing torch is slow.

`Ranks.run(world_size, fn, *args)` calls an importable top-level function in the first `world_size` processes,
each with `torch.distributed` initialised on gloo, and returns its results by rank. This module imports torch
lazily, so that starting a process is cheap until its first job.
"""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

POOL_SIZE = 8
ROOT = Path(__file__).resolve().parent.parent
# How long the other ranks may take to notice that one has failed, before their processes are replaced.
GRACE_S = 5.0
# Threads of the process groups of earlier jobs may live on and keep the cores busy; a process forked anew has none.
JOBS_OF_A_PROCESS = 10


class RanksTimeoutError(Exception):
    """A job did not end in time; its processes have been replaced."""


class RankDiedError(Exception):
    """A rank's process ended without an answer."""


@dataclass(frozen=True)
class _Job:
    module: str
    qualname: str
    arguments: bytes
    rank: int
    world_size: int
    store: str
    timeout_s: float


class Ranks:
    """Rank processes, started by the first jobs that need them and kept until `close`."""

    def __init__(self, size: int = POOL_SIZE) -> None:
        self._workers: dict[int, _Worker] = {}
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="meshtune-ranks-", ignore_cleanup_errors=True)
        self._jobs = 0
        self._served: dict[int, int] = {}

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """`fn(*args)` on every rank of a gloo world; the results by rank, tensors by value.

        The first exception of a rank is raised here, with the rank and the remote traceback as a note. Ranks
        that hang are replaced.

        Args:
            world_size: 1 to the pool's size.
            fn: a top-level function of an importable module (its name travels, not its code).
            args: anything that `torch.save` takes.
            timeout: seconds for the job, with the start of processes that it needs.
        """
        if not 1 <= world_size <= self._size:
            raise ValueError(f"world_size is {world_size}, the pool has {self._size} processes")
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} cannot be imported by name; move it to the top of its module")
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store-{self._jobs}")
        arguments = _dump(args)
        for rank in range(world_size):
            job = _Job(fn.__module__, fn.__qualname__, arguments, rank, world_size, store, timeout)
            self._ready_worker(rank).connection.send(job)
            self._served[rank] = self._served.get(rank, 0) + 1
        return self._collect(world_size, time.monotonic() + timeout)

    def close(self) -> None:
        """End every process."""
        for rank in list(self._workers):
            self._stop(rank)
        self._folder.cleanup()

    def _ready_worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive() or self._served.get(rank, 0) >= JOBS_OF_A_PROCESS:
            self._stop(rank)
            self._workers[rank] = _start(rank)
            self._served[rank] = 0
        return self._workers[rank]

    def _stop(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        answers: dict[int, _Answer] = {}
        pending = {self._workers[rank].connection: rank for rank in range(world_size)}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                answer = answers[rank] = self._receive(rank)
                if answer.failed_at is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in pending.values():
            self._stop(rank)
        if failed := {rank: a for rank, a in answers.items() if a.failed_at is not None}:
            # The others fail because their peer has gone: the first is the cause.
            first = min(failed, key=lambda rank: failed[rank].failed_at)
            raise _decode_error(failed[first], first)
        if pending:
            raise RanksTimeoutError(f"no answer in time from ranks {sorted(pending.values())} of {world_size}")
        return [_load(answers[rank].result) for rank in range(world_size)]

    def _receive(self, rank: int) -> _Answer:
        try:
            return self._workers[rank].connection.recv()
        except (EOFError, ConnectionError):
            self._stop(rank)
            error = RankDiedError("the process ended without an answer")
            return _Answer(error=_dump(error), failed_at=time.monotonic())


@dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection


@dataclass(frozen=True)
class _Answer:
    result: bytes = b""
    error: bytes = b""
    traceback: str = ""
    failed_at: float | None = None


def _start(rank: int) -> _Worker:
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["meshtune.verify.preload"])
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), name=f"rank-{rank}", daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _decode_error(answer: _Answer, rank: int) -> BaseException:
    try:
        error = _load(answer.error)
    except Exception:
        error = RuntimeError("an exception that cannot be pickled; see the remote traceback")
    error.add_note(f"raised on rank {rank}; remote traceback:\n{answer.traceback}")
    return error


def _serve(connection: Connection) -> None:
    """The loop of a rank process: a job in, an answer out, until the other end closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    while True:
        try:
            job: _Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        _work(job, connection)


def _work(job: _Job, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    # An error is sent before this rank leaves the world, which makes the ranks that wait for it fail as well.
    try:
        with _environment(job):
            store = dist.FileStore(job.store, job.world_size)
            limit = timedelta(seconds=job.timeout_s)
            dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
            fn = reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
            result = _dump(fn(*_load(job.arguments)))
            if dist.is_initialized():
                dist.barrier()
        connection.send(_Answer(result=result))
    except BaseException as error:
        failed_at = time.monotonic()
        connection.send(_Answer(error=_dump_error(error), traceback=traceback.format_exc(), failed_at=failed_at))
    finally:
        _leave()


def _leave() -> None:
    """Leave the world, and drop torch's cache of meshes, since a later world reuses the groups' names, and every group, whose
    threads go on as long as a mesh in some cycle of objects holds it."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()


@contextmanager
def _environment(job: _Job) -> Iterator[None]:
    """The variables that `torchrun` sets."""
    before = dict(os.environ)
    names = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["LOCAL_WORLD_SIZE"] = str(job.world_size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _dump(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _dump_error(error: BaseException) -> bytes:
    try:
        return _dump(error)
    except Exception:
        return b""
