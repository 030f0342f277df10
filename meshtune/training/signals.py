"""SIGINT and SIGTERM ask a run to save and leave; every rank learns of it with the next step's token count."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_PATIENCE = 3
"""So many signals of one kind end the process at once."""


class Interrupted(Exception):
    """The run left on a signal, after its checkpoint was written."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"left on {signal.Signals(signum).name} after step {step}, with a checkpoint")
        self.signum = signum
        self.step = step


class SignalStop:
    """While open, counts SIGINT and SIGTERM instead of dying of them.

    The third of either ends the process at once, which leaves the last complete checkpoint as it is.
    """

    def __init__(self) -> None:
        self._counts = {signal.SIGINT: 0, signal.SIGTERM: 0}
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalStop:
        for signum in self._counts:
            try:
                self._previous[signum] = signal.signal(signum, self._handle)
            except ValueError:
                break  # signals belong to the main thread; a run in another thread is stopped by its caller
        return self

    def __exit__(self, _type: type | None, _value: BaseException | None, _traceback: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def requested(self) -> tuple[int, int]:
        return self._counts[signal.SIGINT], self._counts[signal.SIGTERM]

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._counts[signal.Signals(signum)] += 1
        if self._counts[signal.Signals(signum)] >= _PATIENCE:
            raise SystemExit(128 + signum)
