"""The loop: read, step, validate, save, until the last step, a signal or an error."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshtune.data.batch import Batch
from meshtune.data.loader import Cursor
from meshtune.errors import TrainingError
from meshtune.training.best import BestMetric
from meshtune.training.guard import Guard
from meshtune.training.hooks import Hook
from meshtune.training.loss_scale import LossScale
from meshtune.training.signals import Interrupted
from meshtune.training.state import TrainState
from meshtune.training.step import StepResult

_PATIENCE_S = 20.0
"""How long a run that ends by an error waits for a checkpoint that is being written; all ranks are to end within 30."""


class Loader(Protocol):
    """Gives this rank's micro-batches of one global batch after another, and knows the global cursor."""

    def next(self) -> list[Batch]: ...

    def state_dict(self) -> Cursor: ...

    def load_state_dict(self, state: Cursor) -> None: ...

    @property
    def epoch_progress(self) -> float: ...

    taken: list[list[int | str]]


class Saver(Protocol):
    """Keeps checkpoints, maybe in the background. Every rank calls it."""

    def save(self, state: TrainState) -> None:
        """Begin a checkpoint of `state`; raises what the one before it has failed by."""

    def completed(self) -> list[str]:
        """The checkpoints that have become complete since this was last asked."""

    def finish(self, patience: float | None = None) -> None:
        """Wait until none is being written, at most `patience` seconds; raises what it has failed by."""

    def roll_back(self) -> TrainState:
        """Fill model and optimizer from the newest complete checkpoint. Raises TrainingError if there is none."""

    def take_best(self, state: TrainState) -> str:
        """Fill the model from the best checkpoint, and say which it is. Raises TrainingError if there is none."""


@dataclass
class Fit:
    """The parts of a run, built by a recipe, and how often the optional ones are due."""

    step: Callable[[Sequence[Batch], int, float], StepResult]
    loader: Loader
    learning_rate: Callable[[int], float]
    total_steps: int
    saver: Saver | None = None
    save_every: int | None = None
    guard: Guard = field(default_factory=Guard)
    loss_scale: LossScale | None = None
    best: BestMetric | None = None
    validate: Callable[[], dict[str, float | int]] | None = None
    validate_every: int | None = None
    validate_every_epochs: float | None = None


def fit(parts: Fit, state: TrainState, hooks: Sequence[Hook] = ()) -> TrainState:
    """Train from `state.step` to `parts.total_steps`. Raises Interrupted, after saving, if a signal asked to leave."""
    for hook in hooks:
        hook.on_start(state, parts.total_steps)
    try:
        if (state.step == 0 or state.validation_due) and _validate(parts, state, hooks):
            _save(parts, state, hooks)
        while state.step < parts.total_steps:
            _train_once(parts, state, hooks)
    except Exception:
        if parts.saver is not None:
            with contextlib.suppress(Exception):  # the first error is the one that is told
                parts.saver.finish(_PATIENCE_S)
        raise
    finally:
        for hook in hooks:
            hook.on_end(state)
    return state


def _train_once(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> None:
    """One optimizer step, and what is due after it."""
    begun = parts.loader.epoch_progress
    result = _advance(parts, state, hooks)
    requests = result.requests
    if requests.failures and parts.saver is not None:
        parts.saver.finish()
    if result.verdict.action == "rollback":
        _roll_back(parts, state, hooks, result)
        return
    last = state.step == parts.total_steps
    stopped = (requests.interrupts or requests.terminations) and not last
    state.validation_due = last or _validation_due(parts, state, begun)
    better = state.validation_due and not stopped and _validate(parts, state, hooks)
    if last or stopped or better or requests.saves or _due(state.step, parts.save_every):
        _save(parts, state, hooks)
    if last or stopped:
        _finish_saves(parts)
    _tell_of_checkpoints(parts, state, hooks)
    if stopped:
        raise Interrupted(signal.SIGINT if requests.interrupts else signal.SIGTERM, state.step)


def _advance(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> StepResult:
    rate, start = parts.learning_rate(state.step), time.perf_counter()
    batches = parts.loader.next()
    waited = time.perf_counter() - start
    result = parts.step(batches, state.step, rate)
    result.seconds, result.data_wait = time.perf_counter() - start, waited
    if result.verdict.action != "accept":
        result.rows = [number for unit in parts.loader.taken for number in unit]
    if result.verdict.action == "rollback":
        return result
    state.step += 1
    state.tokens += result.tokens
    state.supervised_tokens += result.supervised_tokens
    state.loader = parts.loader.state_dict()
    for hook in hooks:
        hook.on_step(state, result, rate, parts.loader.epoch_progress)
    return result


def _roll_back(parts: Fit, state: TrainState, hooks: Sequence[Hook], result: StepResult) -> None:
    """To the newest checkpoint; on the way again the bad step is skipped, since the guard knows it."""
    bad_step = state.step + 1
    if parts.saver is None:
        raise TrainingError(f"step {bad_step}: {result.verdict.reason}, and no checkpoint to roll back to")
    _finish_saves(parts)
    _tell_of_checkpoints(parts, state, hooks)
    state.become(parts.saver.roll_back())
    parts.loader.load_state_dict(state.loader)
    parts.guard.load_state_dict(state.guard)
    if parts.loss_scale is not None:
        parts.loss_scale.load_state_dict(state.loss_scale)
    for hook in hooks:
        hook.on_rollback(state, result, bad_step)


def _validate(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> bool:
    """Whether it was the best one so far. One before the first step is not compared, as its weights are not kept."""
    state.validation_due = False
    if parts.validate is None:
        return False
    metrics = parts.validate()
    for hook in hooks:
        hook.on_validation(state, metrics, parts.loader.epoch_progress)
    if parts.best is None:
        return False
    value = parts.best.value(metrics)
    if state.step == 0 or not parts.best.is_better(value, None if state.best is None else state.best["value"]):
        return False
    state.best = {"step": state.step, "metric": parts.best.name, "value": value}
    return True


def _save(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> None:
    if parts.saver is None:
        return
    for hook in hooks:
        hook.on_save(state)
    state.guard = parts.guard.state_dict()
    state.loss_scale = {} if parts.loss_scale is None else parts.loss_scale.state_dict()
    parts.saver.save(state)


def _finish_saves(parts: Fit) -> None:
    if parts.saver is not None:
        parts.saver.finish()


def _tell_of_checkpoints(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> None:
    for path in parts.saver.completed() if parts.saver is not None else ():
        for hook in hooks:
            hook.on_checkpoint(state, path)


def _validation_due(parts: Fit, state: TrainState, begun: float) -> bool:
    """`begun` is the epoch progress before the last step."""
    every, now = parts.validate_every_epochs, parts.loader.epoch_progress
    passed = every is not None and math.floor(now / every + 1e-9) > math.floor(begun / every + 1e-9)
    return passed or _due(state.step, parts.validate_every)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
