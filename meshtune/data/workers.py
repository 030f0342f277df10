"""Worker processes of preparation: interpreters of their own, to which blocks go and from which arrays come back.

They are started by command, not by `multiprocessing`: that forks a process in which threads may hold locks, or runs the
user's script again, which may have no guard against it. On Linux one interpreter is started, and forked for each worker.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.blocks import Block
    from meshtune.data.encode_block import BlockEncoder, EncodedBlock

_COMMAND = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); from meshtune.data import workers; workers.host()"
)
_FORKS = sys.platform == "linux"
_BLOCKS_AHEAD = 3  # for each worker: enough that none waits for the writer, little enough to hold in memory
_WORKS_MEANWHILE = True  # this process encodes while the others start
_LEAVE_S = 2.0
# In a thread of its own, though it is only one, the tokenizer allocates from memory that Python's objects do not fragment: a
# quarter less time.
_THREADS_ELSEWHERE = {"TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def encode_in_order(encoder: BlockEncoder, blocks: Iterable[Block], workers: int) -> Iterator[EncodedBlock]:
    """Yield the blocks encoded by so many processes, in their order. Raises what a block raises, and DataError where a process
    is ended from outside.
    """
    payload = pickle.dumps(encoder)
    processes = _started(payload, workers)
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
            if _WORKS_MEANWHILE and not waiting and not all(process.host.ready for process in processes):
                yield encoder.encode(block)
                continue
            waiting.append(threads.submit(run, block))
            if len(waiting) >= workers * _BLOCKS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        for process in processes:
            process.leave()
        processes[-1].wait()
    finally:
        for process in processes:
            process.end()
        threads.shutdown(cancel_futures=True)


class _Host:
    """An interpreter that loads the encoder, and serves one worker, or is forked for each where that is safe: nothing in it
    runs a thread. So the encoder is loaded once, and its tables lie in memory once.
    """

    def __init__(self, payload: bytes, workers: int) -> None:
        pipes = [(*os.pipe(), *os.pipe()) for _ in range(workers if _FORKS else 0)]
        theirs = [descriptor for to, _, _, answers in pipes for descriptor in (to, answers)]
        command = [sys.executable, "-c", _COMMAND, *map(str, theirs)]
        environment = {**os.environ, **_THREADS_ELSEWHERE}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=theirs,
            start_new_session=_FORKS,
        )
        for descriptor in theirs:
            os.close(descriptor)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.streams: list[tuple[IO[bytes], IO[bytes]]] = [(self.process.stdin, self.process.stdout)]
        if _FORKS:
            self.streams = [(os.fdopen(to, "wb"), os.fdopen(answers, "rb")) for _, to, answers, _ in pipes]
        self._feeding = threading.Thread(target=self._feed, args=(payload,), daemon=True)
        self._feeding.start()

    def _feed(self, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; who waits for its answer says so
            assert self.process.stdin is not None and self.process.stdout is not None
            pickle.dump(sys.path, self.process.stdin)
            self.process.stdin.write(payload)
            self.process.stdin.flush()
            self.process.stdout.readline()

    @property
    def ready(self) -> bool:
        """Whether the interpreter has the encoder, or has ended."""
        return not self._feeding.is_alive()

    def wait_until_ready(self) -> None:
        """See `ready`."""
        self._feeding.join()

    def how_one_ended(self) -> str:
        """Return how the first worker to end has ended."""
        assert self.process.stdout is not None
        told = self.process.stdout.readline() if _FORKS else b""
        code = int(told) if told else self.process.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """End the interpreter and all that was forked from it. If it has ended, so have they, or they do when their streams
        close; and its number may be another process's by now.
        """
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL) if _FORKS else self.process.kill()
            self.process.wait()
        self.wait_until_ready()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it had not yet read
                    stream.close()


class _Process:
    """One worker, seen from outside."""

    def __init__(self, host: _Host, to: IO[bytes], answers: IO[bytes]) -> None:
        self.host, self._to, self._answers = host, to, answers

    def encode(self, block: Block) -> EncodedBlock:
        self.host.wait_until_ready()
        try:
            pickle.dump(block, self._to)
            self._to.flush()
            result = pickle.load(self._answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise DataError(
                f"a worker process of preparation has ended {self.host.how_one_ended()}, maybe for want of memory; "
                "data.num_workers: 1 works in this process alone"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def leave(self) -> None:
        """Hang up, nothing being asked of it: it ends by itself."""
        self._to.close()

    def wait(self) -> None:
        """Wait for a moment until all of its interpreter have left, so that the system counts their work as this one's."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.host.process.wait(_LEAVE_S)

    def end(self) -> None:
        self.host.end()
        for stream in (self._to, self._answers):
            with contextlib.suppress(OSError):  # what it had not yet read
                stream.close()


def _started(payload: bytes, workers: int) -> list[_Process]:
    hosts = [_Host(payload, workers)] if _FORKS else [_Host(payload, 1) for _ in range(workers)]
    return [_Process(host, *streams) for host in hosts for streams in host.streams]


def host() -> None:
    """Be a host: load the encoder; serve its blocks, or fork workers that do, and tell how each ends. What the user's function
    prints goes to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one decides
    told = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    encoder: BlockEncoder = pickle.load(sys.stdin.buffer)
    told.write(b"ready\n")
    descriptors = [int(argument) for argument in sys.argv[1:]]
    if not descriptors:
        _serve(encoder, sys.stdin.buffer, os.fdopen(told.fileno(), "wb"))
        return
    gc.freeze()  # a collection in a worker would copy what all of them share
    for blocks, answers in zip(descriptors[::2], descriptors[1::2], strict=True):
        if os.fork() == 0:
            for other in {*descriptors, told.fileno()} - {blocks, answers}:
                os.close(other)
            with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer
                _serve(encoder, os.fdopen(blocks, "rb"), os.fdopen(answers, "wb"))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors[::2]:
        told.write(f"{os.waitstatus_to_exitcode(os.wait()[1])}\n".encode())


def _serve(encoder: BlockEncoder, blocks: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        try:
            block = pickle.load(blocks)
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
