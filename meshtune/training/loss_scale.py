"""The dynamic loss scale of float16: gradients are computed that many times too large, so that small ones do not vanish.

The rule and its constants are torch.amp.GradScaler's: a step whose gradients overflow is not taken and halves the scale; 2000
steps in a row that are taken double it. The scale is a number that follows from steps that all ranks judge alike, so it is the
same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

__all__ = ["LossScale"]


@dataclass
class LossScale:
    """`value` multiplies the loss; `taken` steps in a row were taken with it, and `overflows` steps of the run were not."""

    INITIAL: ClassVar[float] = 2.0**16
    GROWTH: ClassVar[float] = 2.0
    BACKOFF: ClassVar[float] = 0.5
    GROWTH_INTERVAL: ClassVar[int] = 2000
    LEAST: ClassVar[float] = 1.0
    """Gradients that overflow without any scale do so for another reason."""

    value: float = INITIAL
    taken: int = 0
    overflows: int = 0

    def overflowed(self, loss: float, grad_norm: float) -> bool:
        """Whether a step of this loss and norm has failed by the scale: a loss that is not finite has not."""
        return math.isfinite(loss) and not math.isfinite(grad_norm) and self.value > self.LEAST

    def took(self) -> None:
        """A step was taken."""
        self.taken += 1
        if self.taken >= self.GROWTH_INTERVAL:
            self.taken = 0
            self.value *= self.GROWTH

    def lower(self) -> None:
        """A step was not taken, because its gradients have overflowed."""
        self.taken = 0
        self.overflows += 1
        self.value = max(self.LEAST, self.value * self.BACKOFF)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; one without a scale (a run that was not float16 before) begins anew."""
        self.value = float(state.get("value", self.INITIAL))
        self.taken, self.overflows = int(state.get("taken", 0)), int(state.get("overflows", 0))
