"""What a checkpoint holds of model and optimizer: tensors by the names that the transformers model gives them.

A checkpoint of one layout loads into another because these names, and the shapes of whole tensors, are the same on all.
Learning rate, weight decay and other constants of the optimizer are not stored: they follow from the recipe.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_MODEL, _OPTIMIZER = "model", "optimizer"


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """`model.<name>` of every parameter and persistent buffer, sharing their memory.

    A tied tensor is there once, under its first name.
    """
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[f"{_MODEL}.{name}"] = tensor.detach()
    return state


class OptimizerState:
    """An optimizer's moments under its parameters' names.

    Make it before the first step: after a validation the modules of FSDP2 may hold gathered parameters, which are not
    those that the optimizer knows.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._parameters = dict(model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """`optimizer.<name>.<moment>`, sharing memory with the optimizer's state."""
        return {
            f"{_OPTIMIZER}.{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def make(self, stored: Iterable[str]) -> None:
        """Give the parameters whose moments are among the names `stored` some of their own, to be filled.

        A step with zero gradients at learning rate zero makes them; it leaves the weights as they are.
        """
        prefix = f"{_OPTIMIZER}."
        owners = {key.removeprefix(prefix).rpartition(".")[0] for key in stored if key.startswith(prefix)}
        for name, parameter in self._parameters.items():
            parameter.grad = torch.zeros_like(parameter) if name in owners else None
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def moments(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors as large as a parameter the optimizer keeps for each."""
    return 2 if isinstance(optimizer, torch.optim.AdamW) else int(bool(optimizer.defaults.get("momentum")))
