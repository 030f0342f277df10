"""The `lr_scheduler` section of a recipe: the learning rate's factor at each optimizer step.

The formulas are those of `transformers.optimization` (`get_constant_schedule_with_warmup`,
`get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup`, `get_inverse_sqrt_schedule`,
`get_wsd_schedule`), which also start the warm-up at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.errors import RecipeError

__all__ = ["LRSchedulerSection"]

# Hu et al. 2024, MiniCPM (arXiv 2404.06395), section 4: a decay over 10 % of the steps is enough.
WSD_DECAY_RATIO = 0.1
# Time scale of inverse_sqrt without warm-up, as in transformers' get_inverse_sqrt_schedule.
INVERSE_SQRT_TIMESCALE = 10_000


class LRSchedulerSection(Section):
    """How the learning rate changes over the run, counted in optimizer steps."""

    name: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="cosine",
        description="Shape after the warm-up. wsd (warm-up, stable, decay) falls at the end, as a cosine.",
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="Optimizer steps over which the rate rises from 0. Default 0."
    )
    warmup_ratio: float | None = Field(
        default=None, ge=0, le=1, description="The warm-up as a part of all optimizer steps, rounded up."
    )
    min_lr_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Floor, as a part of the learning rate: the curve runs between 1 and it. Default 0. "
        "Not with constant. With wsd the warm-up starts from it too.",
    )
    decay_steps: int | None = Field(
        default=None, ge=0, description="wsd only: optimizer steps of the decay at the end; 0 means no decay."
    )
    decay_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="wsd only: the decay as a part of all optimizer steps, rounded up. "
        "Default 0.1 without decay_steps.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings that contradict each other or have no effect."""
        for steps, ratio in (("warmup_steps", "warmup_ratio"), ("decay_steps", "decay_ratio")):
            if getattr(self, steps) is not None and getattr(self, ratio) is not None:
                yield ratio, f"is set beside {steps}; leave one of the two out"
        if self.name == "constant" and self.min_lr_ratio is not None:
            yield "min_lr_ratio", "has no effect with name: constant, whose rate never falls; leave it out"
        for key in ("decay_steps", "decay_ratio"):
            if getattr(self, key) is not None and self.name != "wsd":
                yield key, f"has no effect with name: {self.name}; leave it out, or set name: wsd"

    def build(self, total_steps: int) -> Callable[[int], float]:
        """The factor of the learning rate at a 0-based optimizer step.

        A pure function of the step, so that a resumed run needs no state of it. From `total_steps` on it
        stays at the end of its curve; only inverse_sqrt goes on falling.

        Args:
            total_steps: optimizer steps of the whole run, at least 1.

        Raises:
            RecipeError: total_steps < 1, or the warm-up (with wsd: and the decay) does not fit into it.
        """
        if total_steps < 1:
            raise RecipeError(f"lr_scheduler: the run has {total_steps} optimizer steps, it needs at least 1")
        warmup = _steps(self.warmup_steps, self.warmup_ratio, total_steps)
        _refuse_too_long("warm-up", self._keys("warmup"), warmup, total_steps)
        floor = self.min_lr_ratio or 0.0
        if self.name == "constant":
            return partial(_with_warmup, warmup=warmup, after=_constant)
        if self.name == "inverse_sqrt":
            after = partial(_inverse_sqrt, floor=floor, timescale=warmup or INVERSE_SQRT_TIMESCALE)
            return partial(_with_warmup, warmup=warmup, after=after)
        if self.name == "wsd":
            decay = self._wsd_decay_steps(total_steps)
            _refuse_too_long("warm-up and decay", self._keys("warmup", "decay"), warmup + decay, total_steps)
            after = partial(_stable_then_cosine, floor=floor, stable=total_steps - warmup - decay, decay=decay)
            return partial(_with_warmup, warmup=warmup, after=after, start=floor)
        after = partial(_CURVES[self.name], floor=floor, length=total_steps - warmup)
        return partial(_with_warmup, warmup=warmup, after=after)

    def _wsd_decay_steps(self, total_steps: int) -> int:
        unset = self.decay_steps is None and self.decay_ratio is None
        return _steps(self.decay_steps, WSD_DECAY_RATIO if unset else self.decay_ratio, total_steps)

    def _keys(self, *parts: str) -> str:
        """The keys of this section that decide about `parts`."""
        keys = [f"{part}_{unit}" for part in parts for unit in ("steps", "ratio")]
        return ", ".join(key for key in keys if getattr(self, key) is not None)


def _steps(steps: int | None, ratio: float | None, total_steps: int) -> int:
    """Steps as given, or the ratio of the total rounded up; rounding first keeps 0.07 of 100 at 7, not 8."""
    if steps is not None:
        return steps
    return 0 if ratio is None else math.ceil(round(ratio * total_steps, 6))


def _refuse_too_long(what: str, keys: str, steps: int, total_steps: int) -> None:
    if steps > total_steps:
        raise RecipeError(
            f"lr_scheduler.{keys}: {what} of {steps} optimizer steps in a run of {total_steps}; shorten it or train longer"
        )


def _with_warmup(step: int, *, warmup: int, after: Callable[[int], float], start: float = 0.0) -> float:
    """Linear from `start` at step 0 to 1 at step `warmup`, then `after`, counted from there."""
    if step < warmup:
        return start + (1.0 - start) * step / warmup
    return after(step - warmup)


def _constant(step: int) -> float:
    return 1.0


def _progress(step: int, length: int) -> float:
    """How much of `length` steps is done, in [0, 1]; a length of 0 is done at once."""
    return min(1.0, step / length) if length > 0 else 1.0


def _linear(step: int, *, floor: float, length: int) -> float:
    return floor + (1.0 - floor) * (1.0 - _progress(step, length))


def _cosine(step: int, *, floor: float, length: int) -> float:
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, length)))


def _inverse_sqrt(step: int, *, floor: float, timescale: int) -> float:
    return floor + (1.0 - floor) * math.sqrt(timescale / (step + timescale))


def _stable_then_cosine(step: int, *, floor: float, stable: int, decay: int) -> float:
    if step < stable or decay == 0:
        return 1.0
    return _cosine(step - stable, floor=floor, length=decay)


_CURVES = {"linear": _linear, "cosine": _cosine}
