"""A torch optimizer in form alone: for those that hand their work to others, and may be left without a parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["BareOptimizer"]


class BareOptimizer(torch.optim.Optimizer):
    """Has groups, which may be empty; no hooks, and no state in torch's sense."""

    def __init__(self, groups: Sequence[dict[str, Any]]):
        # torch's own constructor refuses to be without parameters.
        self.param_groups = list(groups)
        self.defaults, self.state = {}, defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zero."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
