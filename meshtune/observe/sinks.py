"""Where metrics go.

A logging step writes one line with `step, epoch, loss, grad_norm, learning_rate, tokens, supervised_tokens,
tokens_per_second, mfu, peak_memory_bytes, step_time_s, data_wait_s`; a validation writes one with `step, epoch,
validation_loss, validation_perplexity, validation_token_accuracy, validation_tokens`, those of a named set as
`validation_<name>_loss` and so on. A bad step that is skipped writes one with `step, epoch, skipped, rows`, one
that sends the run back to a checkpoint `step` (the checkpoint's), `rolled_back_from, reason, rows`. The counts are
those of the interval's global batches. Only rank 0 has sinks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from meshtune.errors import MeshtuneError
from meshtune.observe.atomic import write_atomically
from meshtune.observe.history import is_validation, parse_line

Metrics = Mapping[str, float | int | None]
Values = Mapping[str, float | int | str | list[int] | None]
"""Metrics, or what happened at a step: texts and lists of whole numbers, which are written as they are."""


class Sink(Protocol):
    """Takes the metrics of a step. Steps never go down."""

    def write(self, step: int, metrics: Values) -> None:
        """Write the metrics of `step`; None stands for a value that is not known."""

    def sync(self) -> None:
        """Return when what was written is on the disk."""

    def close(self) -> None:
        """Write out what is pending and let go of the file."""


class JSONLSink:
    """One JSON object a line, at full precision, flushed with each line; NaN and infinities are written as
    null.

    `resume_step` says after which optimizer step the run goes on: lines of later steps and torn lines are
    dropped in one atomic rewrite, so that the file reads as if the run had never been interrupted. 0 starts
    an empty file; None goes on after whatever whole lines there are."""

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = _cut_back(self._path, resume_step)
        self._file = open(self._path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115

    def write(self, step: int, metrics: Values) -> None:
        """Append one line. Raises `ValueError` where `step` lies before the last one written."""
        if step < self._last_step:
            raise ValueError(f"{self._path}: step {step} comes after step {self._last_step}")
        row = {"step": step, **{name: _json_value(v) for name, v in metrics.items() if name != "step"}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def sync(self) -> None:
        """Return when all lines are on the disk: a loss of power then takes none of them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files: `train/<name>` and `validation/<name>` over the optimizer step.

    `resume_step` as in `JSONLSink`: TensorBoard hides the events of later steps. Raises `MeshtuneError` where
    the package `tensorboard` is missing."""

    def __init__(self, directory: str | os.PathLike[str], resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MeshtuneError(
                "logging.tensorboard is true, but the package tensorboard cannot be imported "
                f"({error}); install it with `pip install meshtune[tensorboard]`"
            ) from error
        purge_step = resume_step + 1 if resume_step else resume_step
        self._writer = SummaryWriter(os.fspath(directory), purge_step=purge_step)

    def write(self, step: int, metrics: Values) -> None:
        """Write each number as a scalar of `step`."""
        validation = is_validation(metrics)
        for name, value in metrics.items():
            # The epoch of a validation stands on the training line of the same step already.
            if not isinstance(value, int | float) or name == "step" or (validation and name == "epoch"):
                continue
            tag = f"validation/{name.removeprefix('validation_')}" if validation else f"train/{name}"
            self._writer.add_scalar(tag, value, global_step=step)

    def sync(self) -> None:
        """Write out pending events."""
        self._writer.flush()

    def close(self) -> None:
        """Write out pending events and close the file."""
        self._writer.close()


def _json_value(value: float | int | str | list[int] | None) -> float | int | str | list[int] | None:
    if value is None or isinstance(value, int | str | list):
        return value
    return float(value) if math.isfinite(value) else None


def _cut_back(path: Path, resume_step: int | None) -> int:
    """Keep the whole lines up to `resume_step`; return the step of the last one, 0 where none is left."""
    content = path.read_bytes() if path.exists() else b""
    kept: list[bytes] = []
    last_step = 0
    for line in content.splitlines():
        row = parse_line(line)
        if row is None or resume_step == 0 or (resume_step is not None and row["step"] > resume_step):
            continue
        kept.append(line + b"\n")
        last_step = row["step"]
    rewritten = b"".join(kept)
    if rewritten != content:
        write_atomically(path, rewritten)
    return last_step
