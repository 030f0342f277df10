"""Where a run stands: everything beside weights and optimizer state that resuming needs, independent of the world size."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """`step` optimizer steps are done; `loader` is the global data cursor after them.

    There is no random state: the numbers of a step follow from seed, step and rank (`step.seed_ranks`).
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    loader: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**values)
