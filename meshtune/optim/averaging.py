"""Schedule-free optimizers: training moves one set of weights, and their average is what is evaluated, kept and exported.

The library goes from one to the other and back by arithmetic, which leaves rounding behind. Here the weights of training
are set aside meanwhile, so that a validation or a checkpoint changes nothing of what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.optim.kept import innermost

__all__ = ["Averaging", "averaged", "averages"]

IN_TRAINING = "training_weight"
"""What the weights of training are called beside the state that a checkpoint holds."""


class Averaging:
    """Of a parameter's weights y in training and z in its state, x = y + (1 - 1 / beta1) (z - y) is the average.

    To be put before one of pytorch-optimizer's schedule-free optimizers among the bases of a class.
    """

    param_groups: list[dict[str, Any]]
    state: Any
    numbers = ("step", "weight_sum", "lr_max")
    in_training: dict[nn.Parameter, Tensor] | None = None
    """While parameters hold averages, what they had before."""
    moments = 3  # z, exp_avg_sq, and in a checkpoint y beside x

    @torch.no_grad()
    def average(self) -> dict[nn.Parameter, Tensor]:
        """Put the average in the place of each weight that has moved; returns this rank's part of what stood there."""
        before: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            beta1 = group["betas"][0]
            for parameter in group["params"]:
                if "z" in (state := self.state.get(parameter, {})):
                    before[parameter] = _local(parameter).clone()
                    _local(parameter).lerp_(_local(state["z"]).to(parameter.dtype), 1 - 1 / beta1)
        return before


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weights in training are not those to be evaluated."""
    return isinstance(innermost(optimizer), Averaging)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Inside, parameters have the values that are to be evaluated; gives this rank's part of those in training, if others."""
    inner = innermost(optimizer)
    if not isinstance(inner, Averaging) or inner.in_training is not None:
        yield (inner.in_training or {}) if isinstance(inner, Averaging) else {}
        return
    before = inner.in_training = inner.average()
    try:
        yield before
    finally:
        inner.in_training = None
        with torch.no_grad():
            for parameter, values in before.items():
                _local(parameter).copy_(values)


def average_for_good(optimizer: torch.optim.Optimizer) -> None:
    """Leave the values that are to be evaluated in the parameters: training is over."""
    inner = innermost(optimizer)
    if isinstance(inner, Averaging) and inner.in_training is None:
        inner.average()
        inner.in_training = {}


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
