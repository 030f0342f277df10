"""A small tree of sections with every kind of field, shared by the tests of the recipe loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from meshtune.config import Section


class Inner(Section):
    """A section inside a section."""

    depth: int = Field(1, description="How deep.")


class Model(Section):
    """Which model is trained."""

    name: str = Field(description="Hub id or folder.")
    revision: str | None = Field(None, description="Branch or commit.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Type of the weights.")
    attention: Literal["none", "no", "auto", "sdpa"] = Field("auto", description="Attention | backend.")
    inner: Inner = Field(default_factory=Inner, description="Nested.")
    config: dict[str, Any] | None = Field(None, description="Overrides of the model's own config.")


class Data(Section):
    """What it learns from."""

    train_path: str | list[str] = Field(description="File or files.")
    packing: bool = Field(False, description="Whether rows share a sequence.")
    lengths: list[int] | None = Field(None, description="Allowed lengths.")
    columns: dict[str, str] | None = Field(None, description="Own names of columns.")


class Training(Section):
    """How it learns."""

    learning_rate: float = Field(description="Peak learning rate.", gt=0)
    max_steps: int | None = Field(None, description="Optimizer steps.", ge=1)
    epochs: float | None = Field(None, description="Passes over the data.")
    max_grad_norm: float | None = Field(1.0, description="Clipping norm.")
    workers: Literal["auto"] | int = Field("auto", description="Reader processes.")
    compile: bool | Literal["reduce-overhead"] = Field(False, description="Compile the model.")
    mixed: int | float | str | None = Field(None, description="Anything that is one value.")
    weights: Annotated[list[float], Field(min_length=1)] | None = Field(None, description="Weights.")

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.max_steps is not None and self.epochs is not None:
            yield "epochs", "found beside max_steps; wanted one of the two"


class Optimizer(Section):
    """How weights move."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="Which optimizer.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the moments.")
    weight_decay: float = Field(0.1, description="Decoupled decay.", ge=0)


class Peft(Section):
    """Adapters."""

    r: int = Field(16, description="Rank.")


class Root(Section):
    """A recipe of the tests."""

    recipe: Literal["sft", "pretrain"] = Field(description="What is trained.")
    seed: int = Field(42, description="Seed of everything random.")
    model: Model = Field(description="The model.")
    data: Data = Field(description="The data.")
    training: Training = Field(description="The training.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    peft: Peft | None = Field(None, description="Adapters, if any.")

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.peft is not None and self.recipe == "pretrain":
            yield "peft", "found with recipe pretrain; wanted sft"


BASE = """\
recipe: sft
model:
  name: org/tiny
data:
  train_path: a.jsonl
training:
  learning_rate: 1e-5
"""

VALUES: dict[str, Any] = {
    "recipe": "sft",
    "model": {"name": "org/tiny"},
    "data": {"train_path": "a.jsonl"},
    "training": {"learning_rate": 1e-5},
}
