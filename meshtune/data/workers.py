"""Worker processes of preparation: interpreters of their own, to which blocks go and from which arrays come back.

They are started by command, not by `multiprocessing`: that forks a process in which threads may hold locks, or runs the
user's script again, which may have no guard against it.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.blocks import Block
    from meshtune.data.encode_block import BlockEncoder, EncodedBlock

_COMMAND = "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); from meshtune.data import workers; workers.serve()"
_BLOCKS_AHEAD = 3  # for each worker: enough that none waits for the writer, little enough to hold in memory
_THREADS_ELSEWHERE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def encode_in_order(encoder: BlockEncoder, blocks: Iterable[Block], workers: int) -> Iterator[EncodedBlock]:
    """Yield the blocks encoded by so many processes, in their order. Raises what a block raises, and DataError where a process
    is ended from outside.
    """
    payload = pickle.dumps(encoder)
    processes = [_Process(payload) for _ in range(workers)]
    free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in processes:
        free.put(process)

    def run(block: Block) -> EncodedBlock:
        process = free.get()
        try:
            return process.encode(block)
        finally:
            free.put(process)

    threads = ThreadPoolExecutor(workers)
    waiting: deque[Future[EncodedBlock]] = deque()
    try:
        for block in blocks:
            waiting.append(threads.submit(run, block))
            if len(waiting) >= workers * _BLOCKS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for process in processes:
            process.end()
        threads.shutdown(cancel_futures=True)


class _Process:
    """One worker, seen from outside."""

    def __init__(self, payload: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_THREADS_ELSEWHERE},
        )
        self._to, self._payload = self._process.stdin, payload

    def encode(self, block: Block) -> EncodedBlock:
        assert self._to is not None and self._process.stdout is not None
        try:
            if self._payload:
                pickle.dump(sys.path, self._to)
                self._to.write(self._payload)
                self._payload = b""
            pickle.dump(block, self._to)
            self._to.flush()
            result = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise DataError(
                f"a worker process of preparation has ended {how}, maybe for want of memory; data.num_workers: 1 works in "
                "this process alone"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what it had not yet read
                    continue


def serve() -> None:
    """Be a worker: read the encoder, then blocks, until there is no more. What the user's function prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one decides
    encoder: BlockEncoder = pickle.load(sys.stdin.buffer)
    while True:
        try:
            block = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_outcome(encoder, block), answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _outcome(encoder: BlockEncoder, block: Any) -> Any:
    try:
        return encoder.encode(block)
    except DataError as error:
        return error
    except Exception as error:
        import traceback

        return RuntimeError("".join(traceback.format_exception(error)))
