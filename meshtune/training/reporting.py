"""The hook that writes what happens: metrics.jsonl, TensorBoard, the display, and at the end the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meshtune.errors import TrainingError
from meshtune.observe import (
    LoggingSection,
    Recorder,
    loss_png,
    model_flops_utilization,
    peak_memory_bytes,
    write_report,
)
from meshtune.training.hooks import Hook
from meshtune.training.state import TrainState
from meshtune.training.step import StepResult

_OWN = ("loss_sum", "grad_norm", "tokens", "supervised_tokens", "seconds", "data_wait", "steps")


class Reporter(Hook):
    """Runs on every rank and writes on rank 0. `flops_per_token` and `peak_flops` (of one device) give the MFU."""

    def __init__(
        self,
        section: LoggingSection,
        run: Path,
        rank: int,
        world_size: int,
        device: torch.device,
        flops_per_token: float,
        peak_flops: float | None,
    ):
        self.section, self.run, self.rank, self.device = section, run, rank, device
        self.world_size, self.flops_per_token, self.peak_flops = world_size, flops_per_token, peak_flops
        self.recorder = Recorder()
        self.progress = section.build_progress(rank)
        self.sinks: list = []
        self._total_steps = 0

    def say(self, text: str) -> None:
        """A line for people, on rank 0."""
        self.progress.message(text)

    def on_start(self, state: TrainState, total_steps: int) -> None:
        self.recorder.load_state_dict(state.recorded)
        if self.rank == 0:
            self.sinks = self.section.build_sinks(self.run, state.step)
        self._total_steps = total_steps
        self.progress.start(total_steps, state.step)

    def on_step(self, state: TrainState, result: StepResult, learning_rate: float, epoch: float) -> None:
        if result.verdict.action == "skip":
            self._skipped(state, result, epoch)
        else:
            self._record(result)
        if state.step % self.section.every_steps == 0 or state.step == self._total_steps:
            self._log(state, learning_rate, epoch)

    def on_rollback(self, state: TrainState, result: StepResult, bad_step: int) -> None:
        """What has been written of the steps that are done again goes, as it does where a run is resumed."""
        self._close()
        self.on_start(state, self._total_steps)
        event = {"rolled_back_from": bad_step, "reason": result.verdict.reason, "rows": result.rows}
        self._write(state.step, {"step": state.step, **event})
        self.say(
            f"WARNING: step {bad_step}: {result.verdict.reason}; rolled back to step {state.step}, and will skip it on the way "
            f"again (rows {_named(result.rows)})"
        )

    def _skipped(self, state: TrainState, result: StepResult, epoch: float) -> None:
        event = {"epoch": epoch, "skipped": result.verdict.reason, "rows": result.rows}
        self._write(state.step, {"step": state.step, **event})
        self.say(f"WARNING: step {state.step} was skipped: {result.verdict.reason} (rows {_named(result.rows)})")

    def _record(self, result: StepResult) -> None:
        self.recorder.record("loss_sum", result.loss_sum, "sum")
        if result.verdict.action != "rescale":
            self.recorder.record("grad_norm", result.grad_norm, "last")
        self.recorder.record("tokens", result.tokens, "sum")
        self.recorder.record("supervised_tokens", result.supervised_tokens, "sum")
        self.recorder.record("seconds", result.seconds, "sum")
        self.recorder.record("data_wait", result.data_wait, "sum")
        self.recorder.record("steps", 1, "sum")
        for name, value in result.metrics.items():
            self.recorder.record(name, value, "last")

    def _log(self, state: TrainState, learning_rate: float, epoch: float) -> None:
        """The loss of an interval is over all its supervised tokens; tokens are those of the interval. Of an interval whose steps
        were all skipped there is nothing to say; one whose steps all overflowed (float16) has no gradient norm."""
        values = self.recorder.flush()
        if not values:
            return
        rate = values["tokens"] / values["seconds"]
        metrics = {
            "step": state.step,
            "epoch": epoch,
            "loss": values["loss_sum"] / values["supervised_tokens"],
            "grad_norm": values.get("grad_norm"),
            "learning_rate": learning_rate,
            "tokens": values["tokens"],
            "supervised_tokens": values["supervised_tokens"],
            "tokens_per_second": rate,
            "mfu": model_flops_utilization(self.flops_per_token, rate, self.peak_flops, self.world_size),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "step_time_s": values["seconds"] / values["steps"],
            "data_wait_s": values["data_wait"] / values["steps"],
            **{name: value for name, value in values.items() if name not in _OWN},
        }
        self._write(state.step, metrics)
        self.progress.update(state.step, metrics)

    def on_validation(self, state: TrainState, metrics: dict[str, float | int], epoch: float) -> None:
        metrics = {"step": state.step, "epoch": epoch, **metrics}
        self._write(state.step, metrics)
        self.progress.validation(state.step, metrics)

    def on_save(self, state: TrainState) -> None:
        """A checkpoint may fall inside a logging interval, which goes on when the run is resumed."""
        state.recorded = self.recorder.state_dict()
        for sink in self.sinks:  # what a checkpoint counts as written is on the disk before it
            sink.sync()

    def on_checkpoint(self, state: TrainState, path: str) -> None:
        self.progress.message(f"saved {path}")

    def on_end(self, state: TrainState) -> None:
        self.progress.close()
        try:
            self._close()
            if self.rank == 0:
                loss_png(self.run / "metrics.jsonl", self.run / "loss.png")
                write_report(self.run)
        except OSError as error:  # a full disk, most often: the training, or the error that ended it, matters more
            self.say(f"WARNING: the report could not be written: {error}")

    def _close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def _write(self, step: int, metrics: dict) -> None:
        try:
            for sink in self.sinks:
                sink.write(step, metrics)
        except OSError as error:
            raise TrainingError(f"the metrics of step {step} could not be written into {self.run}: {error}") from error


def _named(rows: Sequence[int | str], shown: int = 8) -> str:
    more = f" and {len(rows) - shown} more" if len(rows) > shown else ""
    return ", ".join(map(str, rows[:shown])) + more
