"""Where a run stands: all that resuming needs beside weights and optimizer state, independent of the world size."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from meshtune.data.loader import Cursor
from meshtune.errors import CheckpointError


@dataclass
class TrainState:
    """`step` optimizer steps are done; `loader` is the global data cursor after them, `recorded` what has been recorded
    since the last logging step, and `validation_due` says that a signal kept a validation from being run. `best` is the step
    with the best validation (`step`, `metric`, `value`), `guard` what its guard knows of the losses, and `loss_scale` that of
    float16.

    There is no random state: the numbers of a step follow from seed, step and rank (`step.seed_ranks`).
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    loader: Cursor = field(default_factory=lambda: Cursor(epoch=0, units=0))
    recorded: dict[str, Any] = field(default_factory=dict)
    validation_due: bool = False
    best: dict[str, Any] | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Raises CheckpointError for a state of another version."""
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"the checkpoint's state is not one of this version: {error}") from error

    def become(self, other: TrainState) -> None:
        """Take over every value of another state."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))
