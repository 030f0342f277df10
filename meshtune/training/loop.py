"""The loop: read, step, validate, save, until the last step or a signal."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshtune.data.batch import Batch
from meshtune.data.loader import Cursor
from meshtune.training.hooks import Hook
from meshtune.training.signals import Interrupted
from meshtune.training.state import TrainState
from meshtune.training.step import StepResult


class Loader(Protocol):
    """Gives this rank's micro-batches of one global batch after another, and knows the global cursor."""

    def next(self) -> list[Batch]: ...

    def state_dict(self) -> Cursor: ...

    @property
    def epoch_progress(self) -> float: ...


@dataclass
class Fit:
    """The parts of a run, built by a recipe, and how often the optional ones are due."""

    step: Callable[[Sequence[Batch], int, float], StepResult]
    loader: Loader
    learning_rate: Callable[[int], float]
    total_steps: int
    save: Callable[[TrainState], str] | None = None
    save_every: int | None = None
    validate: Callable[[], dict[str, float | int]] | None = None
    validate_every: int | None = None
    validate_every_epochs: float | None = None


def fit(parts: Fit, state: TrainState, hooks: Sequence[Hook] = ()) -> TrainState:
    """Train from `state.step` to `parts.total_steps`. Raises Interrupted, after saving, if a signal asked to leave."""
    for hook in hooks:
        hook.on_start(state, parts.total_steps)
    try:
        if state.step == 0 or state.validation_due:
            _validate(parts, state, hooks)
        while state.step < parts.total_steps:
            begun = parts.loader.epoch_progress
            result = _advance(parts, state, hooks)
            last = state.step == parts.total_steps
            stopped = (result.interrupts or result.terminations) and not last
            state.validation_due = last or _validation_due(parts, state, begun)
            if state.validation_due and not stopped:
                _validate(parts, state, hooks)
            if last or stopped or _due(state.step, parts.save_every):
                _save(parts, state, hooks)
            if stopped:
                raise Interrupted(signal.SIGINT if result.interrupts else signal.SIGTERM, state.step)
    finally:
        for hook in hooks:
            hook.on_end(state)
    return state


def _advance(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> StepResult:
    rate, start = parts.learning_rate(state.step), time.perf_counter()
    result = parts.step(parts.loader.next(), state.step, rate)
    result.seconds = time.perf_counter() - start
    state.step += 1
    state.tokens += result.tokens
    state.supervised_tokens += result.supervised_tokens
    state.loader = parts.loader.state_dict()
    for hook in hooks:
        hook.on_step(state, result, rate, parts.loader.epoch_progress)
    return result


def _validate(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> None:
    state.validation_due = False
    if parts.validate is None:
        return
    metrics = parts.validate()
    for hook in hooks:
        hook.on_validation(state, metrics, parts.loader.epoch_progress)


def _save(parts: Fit, state: TrainState, hooks: Sequence[Hook]) -> None:
    if parts.save is None:
        return
    for hook in hooks:
        hook.on_save(state)
    path = parts.save(state)
    for hook in hooks:
        hook.on_checkpoint(state, path)


def _validation_due(parts: Fit, state: TrainState, begun: float) -> bool:
    """`begun` is the epoch progress before the last step."""
    every, now = parts.validate_every_epochs, parts.loader.epoch_progress
    passed = every is not None and math.floor(now / every + 1e-9) > math.floor(begun / every + 1e-9)
    return passed or _due(state.step, parts.validate_every)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
