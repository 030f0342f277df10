"""Recipe: the sections of every room, joined. It is what a YAML file becomes, whole and frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.checkpoint import CheckpointSection
from meshtune.config import Section
from meshtune.data.section import DataSection
from meshtune.data.shapes import CONVERSATIONAL
from meshtune.layout.section import DistributedSection
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.section import ModelSection
from meshtune.observe.section import LoggingSection
from meshtune.optim.schedule import LRSchedulerSection
from meshtune.optim.section import OptimizerSection
from meshtune.recipes import adapting, memory, optimizing, precision, quantizing, rounding
from meshtune.training.best import COMPARED
from meshtune.training.section import TrainingSection


class Recipe(Section):
    """One training run, as data."""

    recipe: Literal["sft", "pretrain"] = Field(
        "sft",
        description="What is learnt: `sft` the assistant's part of conversations (or all of plain text), `pretrain` all of "
        "plain text.",
    )
    seed: int = Field(42, ge=0, description="Decides row order, dropout and random initial weights.")
    model: ModelSection = Field(description="Which model, and in what form.")
    peft: AdapterSection | None = Field(
        None, description="Train an adapter beside the frozen model. Without it every weight is trained."
    )
    quantization: QuantizationSection | None = Field(
        None, description="Hold the frozen weights in few bits (QLoRA). Without it they keep the checkpoint's dtype."
    )
    distributed: DistributedSection = Field(default_factory=DistributedSection, description="The mesh.")
    data: DataSection = Field(description="What the model learns from.")
    training: TrainingSection = Field(description="How long, with what batches, at what precision.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="The optimizer.")
    lr_scheduler: LRSchedulerSection = Field(
        default_factory=LRSchedulerSection, description="The learning rate's course."
    )
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What is kept, and where.")
    logging: LoggingSection = Field(default_factory=LoggingSection, description="What is recorded and shown.")

    @property
    def rows(self) -> DataSection:
        """The data section, its `auto` format decided where the kind of recipe decides it: pretraining reads plain text."""
        if self.recipe == "pretrain" and self.data.format == "auto":
            return self.data.model_copy(update={"format": "text"})
        return self.data

    def problems(self) -> Iterable[tuple[str, str]]:
        for key in ("eval_every_steps", "eval_every_epochs"):
            if getattr(self.training, key) is not None and not self.data.validation_names:
                yield f"training.{key}", "has no effect without data.validation_path or data.validation_size"
        yield from self._checkpoint_problems()
        yield from adapting.problems(self)
        yield from optimizing.problems(self)
        yield from quantizing.problems(self)
        yield from precision.problems(self)
        yield from rounding.problems(self)
        yield from memory.problems(self)
        if self.recipe == "pretrain" and self.data.format in CONVERSATIONAL:
            yield "data.format", f"`{self.data.format}` belongs to `recipe: sft`; pretraining reads `text` or `tokens`"
        if self.data.streaming:
            if self.training.max_steps is None:
                yield "training.max_steps", "is needed for a stream: how many rows come is not known before"
            for key in ("epochs", "eval_every_epochs"):
                if getattr(self.training, key) is not None:
                    yield f"training.{key}", "cannot be counted on a stream, whose end is not known; count in steps"
        if self.recipe != "pretrain" and self.data.token_paths:
            yield (
                "data.train_path",
                f"{self.data.token_paths[0]} holds plain tokens, which belong to `recipe: pretrain`",
            )

    def _checkpoint_problems(self) -> Iterable[tuple[str, str]]:
        metric, sets = self.checkpoint.best_metric, self.data.validation_names
        if metric is not None and not sets:
            yield (
                "checkpoint.best_metric",
                "has no effect without a validation set (data.validation_path or data.validation_size)",
            )
        elif metric is not None:
            prefixes = [f"validation_{name}_" if name else "validation_" for name in sets]
            known = [prefix + kind for prefix in prefixes for kind in COMPARED]
            if metric not in known:
                yield "checkpoint.best_metric", f"{metric!r} is no metric of a validation; there are {', '.join(known)}"
        if self.training.rolls_back and self.checkpoint.every_steps is None and self.checkpoint.every_minutes is None:
            key = "on_nonfinite" if self.training.on_nonfinite == "rollback" else "on_loss_spike"
            yield (
                f"training.{key}",
                "rollback needs checkpoints on the way: set checkpoint.every_steps or checkpoint.every_minutes",
            )
