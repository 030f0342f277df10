"""The optimizer's step inside the backward: a gradient is used and freed as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["InBackward"]


class InBackward(torch.optim.Optimizer):
    """`inner`, which must treat each parameter by itself, stepped on each when its gradient has been accumulated.

    So the gradients of a model are never there together. Learning rates have to be set before the backward, and there is one
    backward a step. `step` does the rest: parameters that `late` names, and what has got its gradient otherwise.
    """

    def __init__(self, inner: torch.optim.Optimizer, late: Callable[[], Collection[str]] = tuple):
        """`late` gives the names of parameters whose gradients are only settled after the backward."""
        self.inner, self._late = inner, late
        self.defaults, self.state, self.param_groups = inner.defaults, inner.state, inner.param_groups
        self.norms: dict[nn.Parameter, Tensor] = {}
        """Of gradients that have been freed in this step, the L2 norm of this rank's part, 0-d float32."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._take, group, name))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.norms.clear()
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()

    @torch.no_grad()
    def _take(self, group: dict[str, Any], name: str, parameter: nn.Parameter) -> None:
        if name in self._late():
            return
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert local is not None
        (self.norms[parameter],) = torch._foreach_norm([local], 2, dtype=torch.float32)
        groups = self.inner.param_groups
        self.inner.param_groups = [{**group, "params": [parameter]}]
        try:
            self.inner.step()
        finally:
            self.inner.param_groups = groups
        parameter.grad = None
