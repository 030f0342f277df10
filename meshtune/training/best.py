"""Which validation was the best one so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshtune.errors import TrainingError

Mode = Literal["min", "max"]
_BETTER: dict[str, Mode] = {"loss": "min", "perplexity": "min", "token_accuracy": "max"}
COMPARED = tuple(_BETTER)
"""What validations say by which one can be better than another."""


@dataclass(frozen=True)
class BestMetric:
    """The metric of a validation, by its name in metrics.jsonl, by which checkpoints are compared."""

    name: str
    mode: Mode

    @classmethod
    def named(cls, metric: str | None) -> BestMetric | None:
        """The metric of this name, whose ending says whether less or more of it is better; None of no name."""
        if metric is None:
            return None
        return cls(metric, next(mode for ending, mode in _BETTER.items() if metric.endswith(ending)))

    def value(self, metrics: Mapping[str, float | int]) -> float:
        """Raises TrainingError, naming those that there are, if the validation has no such metric."""
        if self.name not in metrics:
            raise TrainingError(
                f"checkpoint.best_metric: a validation has no metric {self.name}; it has {', '.join(metrics)}"
            )
        return float(metrics[self.name])

    def is_better(self, value: float, than: float | None) -> bool:
        """NaN is never better, and an equal value is not: the earlier checkpoint stands."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)
