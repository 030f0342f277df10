"""What to do about a step whose loss or gradient norm is not finite, or whose loss stands out: stop, skip it, roll back.

A loss is a spike if it lies more than `threshold` robust standard deviations above the median of the last `window` losses
of steps that were taken: above `median + threshold * max(1.4826 * MAD, 1 % of |median|)`, where MAD is the median distance from
the median, which 1.4826 makes the standard deviation of normally distributed losses. The floor of 1 % keeps losses that
hardly vary from standing out by nothing. Until a quarter of the window is filled nothing is a spike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshtune.errors import TrainingError

Action = Literal["accept", "rescale", "skip", "rollback", "stop"]
ACTIONS: tuple[Action, ...] = ("accept", "rescale", "skip", "rollback", "stop")
"""From the mildest; ranks that disagree take the strictest. `rescale` is no judgement of a guard's: a step of float16 whose
gradients have overflowed by their loss scale."""

BAD_STEPS_WITHIN = 100
"""So many steps in a row may hold `max_bad_steps` bad ones."""
_DEVIATION = 1.4826
_FLOOR = 0.01


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why, if it is not just taken."""

    action: Action = "accept"
    reason: str = ""


class Guard:
    """Judges each step before it changes a weight; every rank comes to the same end.

    Its state goes into checkpoints: the losses to compare with, and the steps that were found bad, which a run that has been
    rolled back passes over.
    """

    def __init__(
        self,
        on_nonfinite: Action = "stop",
        on_loss_spike: Action = "accept",
        window: int = 100,
        threshold: float = 6.0,
        max_bad_steps: int = 10,
    ) -> None:
        self._on_nonfinite, self._on_loss_spike = on_nonfinite, on_loss_spike
        self._threshold, self._max_bad_steps, self._needed = threshold, max_bad_steps, -(-window // 4)
        self._recent: deque[float] = deque(maxlen=window)
        self._bad: dict[int, str] = {}

    @property
    def forgives(self) -> bool:
        """Whether a bad step may be survived, so that ranks must agree on it."""
        return not {self._on_nonfinite, self._on_loss_spike} <= {"accept", "stop"}

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        """What to do with a step of this global loss and gradient norm. Changes nothing."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Verdict(self._on_nonfinite, f"loss is {loss}, gradient norm {grad_norm}")
        if self._on_loss_spike != "accept" and len(self._recent) >= self._needed:
            limit = self.limit()
            if loss > limit:
                return Verdict(
                    self._on_loss_spike, f"loss {loss:.4g} is a spike: the losses before it allow {limit:.4g}"
                )
        return Verdict()

    def limit(self) -> float:
        """The largest loss that is no spike now."""
        median = statistics.median(self._recent)
        deviation = _DEVIATION * statistics.median(abs(loss - median) for loss in self._recent)
        return median + self._threshold * max(deviation, _FLOOR * abs(median))

    def took(self, loss: float) -> None:
        """A step with this loss was taken."""
        if self._on_loss_spike != "accept":
            self._recent.append(loss)

    def found_bad(self, step: int, reason: str) -> None:
        """Optimizer step `step`, counted from 1, is not taken. Raises TrainingError if there have been too many of them."""
        self._bad[step] = reason
        near = [bad for bad in self._bad if abs(bad - step) < BAD_STEPS_WITHIN]
        if len(near) > self._max_bad_steps:
            raise TrainingError(
                f"step {step}: {reason}; it is bad step number {len(near)} within {BAD_STEPS_WITHIN}, and "
                f"training.max_bad_steps is {self._max_bad_steps}. The newest checkpoint is from before it; lower "
                "training.learning_rate, lengthen the warm-up, or look at the rows that metrics.jsonl names"
            )

    def known_bad(self, step: int) -> str | None:
        """Why `step`, counted from 1, was found bad before the run was rolled back; None if it was not."""
        return self._bad.get(step)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "bad": [[step, reason] for step, reason in self._bad.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the losses of a state, and its bad steps beside those that are known."""
        self._recent = deque(state.get("recent", ()), self._recent.maxlen)
        self._bad.update({int(step): str(reason) for step, reason in state.get("bad", ())})
