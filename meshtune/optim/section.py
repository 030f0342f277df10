"""The `optimizer` section of a recipe, and the optimizer that it builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.optim.groups import GroupSection
from meshtune.optim.methods import METHODS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshtune.optim.build import Known

__all__ = ["OptimizerSection"]

Name = Literal[
    "adamw",
    "sgd",
    "adafactor",
    "muon",
    "lion",
    "soap",
    "schedule_free_adamw",
    "adamw_8bit",
    "adamw_4bit",
]


class OptimizerSection(Section):
    """Which optimizer updates the weights, and with which constants."""

    name: Name = Field(
        default="adamw",
        description="`adamw` (decoupled weight decay), `sgd`, `adafactor`, and `muon` (hidden matrices; embeddings, head, norms "
        "and biases get adamw) are torch's; `lion`, `soap` and `schedule_free_adamw` pytorch-optimizer's (extra `optimizers`); "
        "`adamw_8bit` and `adamw_4bit`, with moments in few bits, torchao's (extra `torchao`).",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decay of the weights for each unit of learning rate; never on biases and normalisation "
        "weights, but where a group says so. With sgd it is the L2 term that torch adds to the gradient.",
    )
    betas: tuple[float, float] | None = Field(
        default=None,
        description="Decay of the two running moments, each in [0, 1), of adamw (also that of muon), adamw_8bit, adamw_4bit, "
        "lion, soap and schedule_free_adamw. Default 0.9, 0.999; lion 0.9, 0.99; soap 0.95, 0.95.",
    )
    eps: float | None = Field(
        default=None,
        ge=0,
        description="Added to the denominator of the update, of the same but lion. Default 1e-8.",
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        description="sgd and muon: decay of the running gradient. Default 0, which keeps none; muon 0.95.",
    )
    nesterov: bool | None = Field(
        default=None, description="sgd and muon: Nesterov's form of momentum. Default false; muon true."
    )
    adjust_lr: Literal["original", "match_rms_adamw"] | None = Field(
        default=None,
        description="muon only: how the learning rate depends on a matrix's shape. `match_rms_adamw`, the default, makes updates "
        "as large as adamw's, so that one rate suits both; `original` is sqrt(max(1, rows / columns)).",
    )
    decay_rate: float | None = Field(
        default=None, le=0, description="adafactor only: beta2 at step t is 1 - t ** decay_rate. Default -0.8."
    )
    clip_threshold: float | None = Field(
        default=None, ge=1, description="adafactor only: the largest root mean square of an update. Default 1."
    )
    precondition_frequency: int | None = Field(
        default=None, ge=1, description="soap only: steps between two changes of the eigenbases. Default 10."
    )
    groups: list[GroupSection] = Field(
        default_factory=list,
        description="Parameters with a learning rate or weight decay of their own, by patterns; the first that matches has one.",
    )
    rounding: Literal["nearest", "stochastic", "kahan"] | None = Field(
        default=None,
        description="How weights that are held in bfloat16 (`model.dtype: bfloat16`) are rounded after an update: `stochastic` "
        "up or down by chance, so that the mean is exact; `kahan` to the nearest, keeping what that takes away beside them; "
        "`nearest` alone loses small updates. Default there: stochastic.",
    )
    in_backward: bool = Field(
        default=False,
        description="Update each weight as soon as its gradient is complete, and free that. With adamw, sgd or lion, one "
        "micro-batch a step, and no clipping (`training.max_grad_norm: null`).",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings of the other optimizer, and values out of range."""
        for key in sorted({key for method in METHODS.values() for key in method.keys}):
            if getattr(self, key) is not None and key not in METHODS[self.name].keys:
                owners = " or ".join(name for name, method in METHODS.items() if key in method.keys)
                yield key, f"has no effect with name: {self.name}; leave it out, or set name: {owners}"
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            yield "betas", f"found {self.betas[0]}, {self.betas[1]}; wanted two numbers in [0, 1)"
        if self.name == "schedule_free_adamw" and self.betas is not None and not self.betas[0]:
            yield "betas", "the first must be above 0: it says how far training stands from the average"
        if self.name != "muon":
            for index, group in enumerate(self.groups):
                if group.name is not None:
                    yield f"groups.{index}.name", f"has no effect with name: {self.name}, which is one; leave it out"
        if self.name == "sgd" and self.nesterov and not self.momentum:
            yield "nesterov", "needs momentum above 0; set momentum, for example 0.9"

    def build(
        self, named_modules: Iterable[tuple[str, nn.Module]], learning_rate: float, known: Known | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of `named_modules` (`model.named_modules()`); see `meshtune.optim.build`.

        Raises:
            ModelError: no parameter is trainable.
        """
        from meshtune.optim.build import build

        return build(self, named_modules, learning_rate, known)
