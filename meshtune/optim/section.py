"""The `optimizer` section of a recipe, and the optimizer that it builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshtune.config import Section

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OptimizerSection"]

# Devices on which torch has a fused AdamW; elsewhere it chooses between foreach and a loop.
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
ADAMW_BETAS = (0.9, 0.999)
ADAMW_EPS = 1e-8


class OptimizerSection(Section):
    """Which optimizer updates the weights, and with which constants."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw", description="AdamW (decoupled weight decay) or stochastic gradient descent."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decay of the weights for each unit of learning rate; never on biases and normalisation "
        "weights. With sgd it is the L2 term that torch adds to the gradient.",
    )
    betas: tuple[float, float] | None = Field(
        default=None,
        description="adamw only: decay of the two running moments, each in [0, 1). Default 0.9, 0.999.",
    )
    eps: float | None = Field(
        default=None, ge=0, description="adamw only: added to the denominator of the update. Default 1e-8."
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        description="sgd only: decay of the running gradient. Default 0, which keeps none.",
    )
    nesterov: bool | None = Field(default=None, description="sgd only: Nesterov's form of momentum. Default false.")
    rounding: Literal["nearest", "stochastic", "kahan"] | None = Field(
        default=None,
        description="How weights that are held in bfloat16 (`model.dtype: bfloat16`) are rounded after an update: `stochastic` up "
        "or down by chance, so that the mean is exact; `kahan` to the nearest, keeping what that takes away beside them; `nearest` "
        "alone loses small updates. Default there: stochastic.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings of the other optimizer, and values out of range."""
        only_for = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}
        for key, owner in only_for.items():
            if getattr(self, key) is not None and owner != self.name:
                yield key, f"has no effect with name: {self.name}; leave it out, or set name: {owner}"
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            yield "betas", f"found {self.betas[0]}, {self.betas[1]}; wanted two numbers in [0, 1)"
        if self.name == "sgd" and self.nesterov and not self.momentum:
            yield "nesterov", "needs momentum above 0; set momentum, for example 0.9"

    def build(self, named_modules: Iterable[tuple[str, nn.Module]], learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of `named_modules` (`model.named_modules()`).

        Works on plain tensors and DTensors alike, in any mixture. AdamW's fused kernel is used when every
        parameter is on a device that has one (`FUSED_DEVICES`); on CPU it takes a third of the time of the
        loop.

        Raises:
            ModelError: no parameter is trainable.
        """
        import torch

        from meshtune.optim.parameter_groups import parameter_groups

        groups = parameter_groups(named_modules, self.weight_decay)
        parameters = [p for group in groups for p in group["params"]]
        if self.name == "adamw":
            fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters) or None
            betas = ADAMW_BETAS if self.betas is None else self.betas
            eps = ADAMW_EPS if self.eps is None else self.eps
            return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused)
        momentum, nesterov = self.momentum or 0.0, bool(self.nesterov)
        return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov)
