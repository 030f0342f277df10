"""How a command ends: 0 done; 2 an error found before training; 1 a failure in training; 130, 143 left on a signal."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from meshtune.errors import MeshtuneError
from meshtune.launch.rank import first_to_say, report_exit

# How long a rank of torchrun waits for rank 0 to say what all of them have to say: the first to leave ends the others.
_AFTER_RANK_0_S = 1.0


class Phase:
    """Whether training has begun, on which the exit code of an error depends, and which recipe the command reads."""

    training = False
    recipe: tuple[Path, Sequence[str]] | None = None

    def begin_training(self) -> None:
        self.training = True

    def placed(self, text: str) -> str:
        """`text` with the file and line of each setting that it blames."""
        if self.recipe is None:
            return text
        from meshtune.config import with_places
        from meshtune.recipes.recipe import Recipe

        path, overrides = self.recipe
        return with_places(Recipe, text, path, overrides)


@dataclass(frozen=True)
class _Failure:
    """What the user is told, and by whom: by one rank if it is `shared`; by the launcher, where there is one, if it is
    `by_launcher`: it knows whether the rank was only ended for the sake of another."""

    code: int
    text: str
    shared: bool = False
    by_launcher: bool = False


@contextmanager
def exits() -> Iterator[Phase]:
    """Turn what is raised inside into a message and SystemExit with the command's exit code. SIGTERM leaves at once, as
    Ctrl-C does, until training takes both over."""
    phase = Phase()
    previous = _on_sigterm(_leave_at_once)
    try:
        yield phase
    except BaseException as error:
        if isinstance(error, BrokenPipeError) or (isinstance(error, SystemExit) and not _signal_of(error)):
            raise  # nobody reads on, as in `meshtune schema | head`; or the exit code stands already
        failure = _failure(error, phase)
        # The ranks of a failed run are ended one after another; this one has its message to say first.
        _on_sigterm(signal.SIG_IGN)
        _tell(failure)
        raise SystemExit(failure.code) from error
    finally:
        _on_sigterm(previous)


def _failure(error: BaseException, phase: Phase) -> _Failure:
    code = 1 if phase.training else 2
    if isinstance(error, MeshtuneError):
        return _Failure(code, f"error: {phase.placed(str(error))}", error.shared)
    if isinstance(error, KeyboardInterrupt):
        return _Failure(130, _left(signal.SIGINT, phase), shared=True, by_launcher=True)
    if isinstance(error, SystemExit):
        signum = _signal_of(error)
        return _Failure(128 + signum, _left(signum, phase), shared=True, by_launcher=True)
    stopped_by = getattr(error, "signum", None)
    if stopped_by is not None:
        return _Failure(128 + int(stopped_by), f"{error}; run the same command again to continue", shared=True)
    if _lost_a_peer(error):
        return _Failure(code, _whom(error), by_launcher=True)
    if isinstance(error, OSError):  # a disk, a file or a network, which the user knows better than a traceback does
        return _Failure(code, f"error: {type(error).__name__}: {error}")
    trace = "".join(traceback.format_exception(error))
    return _Failure(code, f"error: {type(error).__name__}: {error}\n{trace}")


def _signal_of(error: SystemExit) -> int:
    """The signal on which a handler raised this; 0 if it was none."""
    return error.code - 128 if isinstance(error.code, int) and error.code > 128 else 0


def _left(signum: int, phase: Phase) -> str:
    name = signal.Signals(signum).name
    if not phase.training:
        return f"left on {name}"
    return f"left at once on {name}; the last complete checkpoint stands, and the same command continues from it"


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank's process, or the way to it, has gone."""
    if not isinstance(error, RuntimeError) or "RANK" not in os.environ:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport" in str(error) or "Connection closed by peer" in str(error)


def _whom(error: BaseException) -> str:
    """Which ranks did not come, where that is why a collective failed and can be known."""
    from meshtune.layout.absent import absent_ranks

    absent = absent_ranks(in_vain="Timed out" in str(error))
    if not absent:
        return f"rank {os.environ['RANK']} lost contact with another rank ({_first_line(error)})"
    who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    return (
        f"{who} did not come to where the others waited ({_first_line(error)}): hanging, or busy for longer than "
        "distributed.timeout_minutes; the last complete checkpoint stands, and the same command continues from it"
    )


def _tell(failure: _Failure) -> None:
    rank = os.environ.get("RANK", "0")
    launched = first_to_say(failure.text)
    if failure.by_launcher and launched is not None:
        report_exit(failure.code, untold=failure.text)
        return
    report_exit(failure.code)
    if launched or (launched is None and (rank == "0" or not failure.shared)):
        prefix = "meshtune: " if failure.shared or "RANK" not in os.environ else f"meshtune: rank {rank}: "
        print(prefix + failure.text, file=sys.stderr, flush=True)
    elif launched is None:
        time.sleep(_AFTER_RANK_0_S)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _leave_at_once(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _on_sigterm(handler: Any) -> Any:
    """Set the handler, and return the one before; None where signals are not this thread's to handle."""
    try:
        return signal.signal(signal.SIGTERM, handler) if handler is not None else None
    except ValueError:
        return None


def leave(code: Any) -> None:
    """End the process with the exit code of a SystemExit.

    Not by way of the interpreter's finalisation, in which threads of torch have been seen to abort a rank that was done;
    nor, after an error, of exit handlers, which may wait for ranks that are gone.
    """
    if not code:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
