"""What the user sees while a run is going on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Group

Metrics = Mapping[str, float | int | None]
ProgressMode = Literal["auto", "rich", "plain", "none"]


def make_progress(mode: ProgressMode, stream: TextIO | None = None) -> Progress:
    """The display for `mode`, writing to `stream` (standard output by default); `none` gives the silent
    one."""
    stream = stream or sys.stdout
    if mode == "none":
        return Progress()
    if mode == "rich" or (mode == "auto" and stream.isatty()):
        return RichProgress(stream)
    return PlainProgress(stream)


class Progress:
    """The silent display, and the interface of the others. `close` may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, total_steps: int, initial_step: int = 0) -> None:
        """Begin to show a run of `total_steps` optimizer steps of which `initial_step` are done."""

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that `step` is done, with the metrics of a logging step."""

    def validation(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a validation after `step`."""

    def message(self, text: str) -> None:
        """Show a line of text that stays."""

    def close(self) -> None:
        """Leave the last state on the screen and stop."""


class Eta:
    """Seconds left, from the pace of the latest steps; validations and checkpoints between them count."""

    def __init__(self, total_steps: int, initial_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque([(initial_step, clock())], maxlen=64)

    def advance(self, step: int) -> None:
        """Note that `step` is done now."""
        self._seen.append((step, self._clock()))

    def __str__(self) -> str:
        """`h:mm:ss`, or `-:--:--` before the first step."""
        (first, start), (last, now) = self._seen[0], self._seen[-1]
        if last <= first:
            return "-:--:--"
        seconds = (now - start) / (last - first) * max(0, self.total_steps - last)
        return str(timedelta(seconds=round(seconds)))


class PlainProgress(Progress):
    """One line for each logging step: for log files, batch systems, notebooks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._eta = Eta(0, 0)

    def start(self, total_steps: int, initial_step: int = 0) -> None:
        self._eta = Eta(total_steps, initial_step)

    def update(self, step: int, metrics: Metrics) -> None:
        self._eta.advance(step)
        values = "".join(f"  {text}" for text in describe(metrics))
        self.message(f"step {step}/{self._eta.total_steps}{values}  eta {self._eta}")

    def validation(self, step: int, metrics: Metrics) -> None:
        self.message(_validation_line(step, metrics))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class RichProgress(Progress):
    """A bar with step, ETA and the latest metrics, kept below the messages."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._eta = Eta(0, 0)
        self._step = 0
        self._metrics: list[str] = []
        self._validation: list[str] = []
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def start(self, total_steps: int, initial_step: int = 0) -> None:
        self._eta = Eta(total_steps, initial_step)
        self._step = initial_step
        self._live.start()

    def update(self, step: int, metrics: Metrics) -> None:
        self._eta.advance(step)
        self._step = step
        self._metrics = describe(metrics)

    def validation(self, step: int, metrics: Metrics) -> None:
        self._validation = describe(metrics)
        self.message(_validation_line(step, metrics))

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = self._eta.total_steps
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_column(no_wrap=True)
        head.add_row(
            Text(f"step {self._step}/{total}", style="bold"),
            ProgressBar(total=max(1, total), completed=self._step),
            Text(f"{self._step / total:4.0%}" if total else "", style="cyan"),
            Text(f"eta {self._eta}", style="dim"),
        )
        line = Text("  ".join([*self._metrics, *self._validation]), style="dim", overflow="fold")
        return Group(head, line)


def describe(metrics: Metrics) -> list[str]:
    """The metrics that a reader follows, as short texts in a fixed order; unknown values are left out."""
    forms: dict[str, Callable[[float], str]] = {
        "loss": lambda v: f"loss {v:.4f}",
        "grad_norm": lambda v: f"grad_norm {v:.3g}",
        "learning_rate": lambda v: f"lr {v:.1e}",
        "tokens_per_second": lambda v: f"{v:,.0f} tok/s",
    }
    known = {name: metrics.get(name) for name in forms}
    shown = [forms[name](value) for name, value in known.items() if value is not None]
    return shown + [f"{name} {value:.4f}" for name, value in metrics.items() if _of_a_set(name) and value is not None]


def _of_a_set(name: str) -> bool:
    return name.startswith("validation_") and name.endswith(("loss", "accuracy"))


def _validation_line(step: int, metrics: Metrics) -> str:
    return "  ".join([f"step {step}", *describe(metrics)])
