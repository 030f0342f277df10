"""When a run's checkpoints are due by the clock, what goes into them, and how a run goes back to one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.checkpoint import folder
from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.checkpoint.checksums import find_sound
from meshtune.checkpoint.loading import load_weights
from meshtune.errors import TrainingError
from meshtune.models.adapters.view import kept_of
from meshtune.optim.averaging import averaged
from meshtune.training.state import TrainState

if TYPE_CHECKING:
    import torch

    from meshtune.recipes.run import Setup


class RunSaver:
    """The checkpoints of a run, as its loop asks for them."""

    def __init__(self, setup: Setup, keeper: Checkpointer, optimizer: torch.optim.Optimizer):
        self._setup, self._keeper, self._optimizer = setup, keeper, optimizer
        self._saved_at = time.monotonic()

    def save(self, state: TrainState) -> None:
        best = None if state.best is None else folder.Best(**state.best)
        with averaged(self._optimizer):
            path = self._keeper.save(state.step, self._facts(state), best)
            if self._setup.recipe.checkpoint.export == "all":
                self._setup.export(path / "export")
        self._saved_at = time.monotonic()

    def completed(self) -> list[str]:
        return [str(path) for path in self._keeper.completed()]

    def finish(self, patience: float | None = None) -> None:
        self._keeper.finish(patience)

    def roll_back(self) -> TrainState:
        setup = self._setup
        newest = find_sound(lambda damaged: folder.newest(setup.run, damaged), setup.world, {})
        if newest is None:
            raise TrainingError(
                f"there is no checkpoint in {setup.run} to roll back to yet; save earlier (checkpoint.every_steps), or "
                "write skip or stop in place of rollback"
            )
        return TrainState.from_dict(self._keeper.load(newest.path)["state"])

    def resume(self, path: Path) -> TrainState:
        """Fill model and optimizer from the checkpoint at `path`. The best checkpoint so far is forgotten if the run folder
        does not have it, or another metric decides now."""
        state = TrainState.from_dict(self._keeper.load(path)["state"])
        state.best = self._setup.world.from_first(lambda: self._known_best(state.best))
        return state

    def take_best(self, state: TrainState) -> str:
        """Fill the model from the best checkpoint so far, and say which it is.

        Raises TrainingError where no validation was the best one, CheckpointError if the checkpoint is damaged.
        """
        if state.best is None:
            metric = self._setup.recipe.checkpoint.best_metric
            raise TrainingError(
                f"checkpoint.export: best, but no validation of this run gave a {metric} to compare; `meshtune export "
                f"{self._setup.run} --to FOLDER` exports the newest checkpoint"
            )
        path = folder.path_of(self._setup.run, state.best["step"])
        if state.best["step"] != state.step:
            find_sound(lambda damaged: folder.read(path, damaged), self._setup.world, {})
            load_weights(path, self._setup.model.model, kept_of(self._setup.model.model))
        return f"{path} ({state.best['metric']} {state.best['value']:.6g})"

    def _known_best(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        run, metric = self._setup.run, self._setup.recipe.checkpoint.best_metric
        steps = {complete.step for complete in folder.checkpoints(run)}
        if best is not None and (best["metric"] != metric or best["step"] not in steps):
            best = None
        folder.point_to(run, None if best is None else folder.Best(**best))
        return best

    def is_due(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last one, by the clock of the first rank."""
        minutes = self._setup.recipe.checkpoint.every_minutes
        if minutes is None or not self._setup.world.is_first:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def has_failed(self) -> bool:
        return self._keeper.failed

    def _facts(self, state: TrainState) -> dict[str, Any]:
        setup = self._setup
        return {
            "state": state.as_dict(),
            "data": setup.train_data.fingerprint,
            "layout": setup.layout.describe(),
            "global_batch_size": setup.plan.sizes.global_batch_size,
            "precision": setup.precision,
            "attention": setup.attention.implementation,
            "total_steps": setup.course.total_steps,
            **({} if setup.base is None else {"base": setup.base}),
            **({} if setup.trained is None else setup.trained.as_dict()),
        }
