"""One piece of work at a time in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs what it is given beside the training; what that raises comes up in `finish`.

    The thread does not keep the process alive: who leaves in order calls `finish` before.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`. Raises RuntimeError where an earlier one has not been finished."""
        if self._thread is not None:
            raise RuntimeError("the work before has not been finished")
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def finish(self, patience: float | None = None) -> None:
        """Wait for the work, at most `patience` seconds, and raise what it has raised. Once; then there is no work."""
        if self._thread is None:
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            return
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
