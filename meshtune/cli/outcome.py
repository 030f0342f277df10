"""How a command ends: 0 done; 2 an error found before training; 1 a failure in training; 130, 143 left on a signal."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from meshtune.errors import MeshtuneError


class Phase:
    """Whether training has begun, on which the exit code of an error depends."""

    training = False

    def begin_training(self) -> None:
        self.training = True


@contextmanager
def exits() -> Iterator[Phase]:
    """Turn what is raised inside into a message and the process's exit code."""
    from meshtune.launch.rank import report_exit

    phase = Phase()
    code = 0
    try:
        yield phase
    except MeshtuneError as error:
        code = 1 if phase.training else 2
        _say(f"error: {error}", error.shared)
    except KeyboardInterrupt:
        code = 130
        _say("interrupted", shared=True)
    except Exception as error:
        signum = getattr(error, "signum", None)
        if signum is not None:
            code = 128 + int(signum)
            _say(f"{error}; run the same command again to continue", shared=True)
        else:
            code = 1 if phase.training else 2
            _say(f"error: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    if code:
        report_exit(code)
        _leave(code)


def _say(text: str, shared: bool = False) -> None:
    """On standard error; what every rank has in common is said by rank 0 alone."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not shared:
        prefix = "meshtune: " if rank == "0" else f"meshtune: rank {rank}: "
        print(prefix + text, file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """End at once: after an error, destroying a process group may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
