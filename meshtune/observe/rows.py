"""How far the preparation of rows has come, for who waits for it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_QUIET_S, _LINE_S, _LIVE_S = 2.0, 15.0, 0.2


class RowProgress:
    """Rows and tokens so far: a line that is written anew on a terminal, a line now and then anywhere else, nothing where the
    work is done in two seconds.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._due = self._started + _QUIET_S
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._shown:
            print(file=self._stream, flush=True)

    def update(self, rows: int, tokens: int) -> None:
        """Show that so many rows are prepared, which have so many tokens, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due, self._shown = now + (_LIVE_S if self._live else _LINE_S), True
        pace = rows / (now - self._started)
        line = f"preparing {self._what}: {rows:,} rows, {tokens:,} tokens, {pace:,.0f} rows/s"
        if self._live:
            print(f"\r\033[K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)
