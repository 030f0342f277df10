"""What a loop tells others. A hook does its work in whichever of these it overrides; the base does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtune.training.state import TrainState
    from meshtune.training.step import StepResult


class Hook:
    """Called on every rank, in the order in which hooks were given."""

    def on_start(self, state: TrainState, total_steps: int) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step(self, state: TrainState, result: StepResult, learning_rate: float, epoch: float) -> None:
        """After each optimizer step; `state.step` counts it, also where `result.verdict` says that it was skipped."""

    def on_rollback(self, state: TrainState, result: StepResult, bad_step: int) -> None:
        """After a bad step that sent the run back to a checkpoint, whose `state` it is now."""

    def on_validation(self, state: TrainState, metrics: dict[str, float | int], epoch: float) -> None:
        """After each validation pass."""

    def on_save(self, state: TrainState) -> None:
        """Before a checkpoint is written: what has to outlive this process goes into `state`."""

    def on_checkpoint(self, state: TrainState, path: str) -> None:
        """After a checkpoint is complete."""

    def on_end(self, state: TrainState) -> None:
        """Once, however training ended."""
