"""The loss curve as a picture."""

from __future__ import annotations

import io
import os
from itertools import cycle
from typing import TYPE_CHECKING

from meshtune.observe.atomic import write_atomically
from meshtune.observe.history import History, Point, points, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VALIDATION_COLORS = ("#d9730d", "#2e8b57", "#8e44ad", "#b03060", "#7f6000")


def loss_png(metrics_jsonl: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> None:
    """Draw training loss (raw and smoothed) and validation loss over optimizer steps to a PNG.

    A missing file, one logged step or none are drawn too. No display is needed and pyplot's state is left
    alone."""
    # Not pyplot: it would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = History.read(metrics_jsonl)
    train, validation = points(history.train, "loss"), history.validation_losses
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if any(value is not None for curve in (train, *validation.values()) for _, value in curve):
        _draw(axes, train, validation)
    else:
        axes.text(0.5, 0.5, "Nothing logged yet", ha="center", va="center", transform=axes.transAxes, color="0.5")
        axes.set(xticks=[], yticks=[])
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(out_path, picture.getvalue())


def _draw(axes: Axes, train: list[Point], validation: dict[str, list[Point]]) -> None:
    from matplotlib.ticker import MaxNLocator

    alone = "o" if len(train) == 1 else None
    if train:
        axes.plot(*_columns(train), color="#3b6fd4", alpha=0.3, linewidth=1, marker=alone, label="training")
        axes.plot(*_columns(smoothed(train)), color="#3b6fd4", linewidth=1.8, label="training, smoothed")
    for color, (name, curve) in zip(cycle(_VALIDATION_COLORS), validation.items(), strict=False):
        axes.plot(*_columns(curve), color=color, marker="o", markersize=4, label=name)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _columns(values: list[Point]) -> tuple[list[float], list[float]]:
    """Steps and values; an unknown value is NaN, which leaves a gap."""
    return [step for step, _ in values], [float("nan") if value is None else value for _, value in values]
