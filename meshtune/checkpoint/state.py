"""What a checkpoint holds of model and optimizer: tensors by the names that the transformers model gives them.

A checkpoint of one layout loads into another because these names, and the shapes of whole tensors, are the same on all.
Learning rate, weight decay and other constants of the optimizer are not stored: they follow from the recipe.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.checkpoint.part import Part
from meshtune.layout.pieces import Piece, aliases, named_pieces

_MODEL, _OPTIMIZER = "model", "optimizer"


State = dict[str, Tensor]


def model_state(model: nn.Module) -> State:
    """`model.<name>` of every parameter and persistent buffer, sharing their memory.

    A tied tensor is there once, under the name of its origin, also where this rank has only a copy of it.
    """
    seen: set[int] = set()
    state: State = {}
    pieces, names = named_pieces(model), aliases(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[f"{_MODEL}.{names.get(name, name)}"] = _part(tensor.detach(), pieces.get(name))
    return state


def _part(tensor: Tensor, piece: Piece | None) -> Tensor:
    if piece is None:
        return tensor
    return Part(tensor.to_local() if piece.axis == "fsdp" and isinstance(tensor, DTensor) else tensor, piece)


class OptimizerState:
    """An optimizer's moments under its parameters' names.

    Make it before the first step: after a validation the modules of FSDP2 may hold gathered parameters, which are not
    those that the optimizer knows.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._parameters = dict(model.named_parameters())
        self._pieces, self._names = named_pieces(model), aliases(model)

    def tensors(self) -> State:
        """`optimizer.<name>.<moment>`, sharing memory with the optimizer's state."""
        return {
            f"{_OPTIMIZER}.{self._names.get(name, name)}.{key}": _part(
                value, self._pieces.get(name) if value.ndim else None
            )
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
            parameter.grad = torch.zeros_like(parameter) if self._names.get(name, name) in owners else None
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
