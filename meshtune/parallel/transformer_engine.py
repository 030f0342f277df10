"""Float8 by NVIDIA's Transformer Engine in the place of torchao: `training.fp8.backend: transformer_engine`.

Written from the package's source (2.20.2) and not yet run: it needs a CUDA device (docs/decisions/0028). The package's layers
want parameters of their own and put a state beside them into every state dict. So a model's linear layer stays what it is, and
lends its weight to a layer of the package for each call. Scales are those of the tensors at hand, as torchao's are: then that
state is empty.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["swap"]

_MULTIPLE = 16  # of rows, which the gradient of a weight sums over


def swap(model: nn.Module, names: Collection[str]) -> None:
    """Let those of the linear layers `names` that `model` has compute by the package, with the weights that they have."""
    for path, module in list(model.named_modules()):
        if path in names and isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _Linear(module))


class _Linear(nn.Linear):
    """[..., in] to [..., out] by `transformer_engine.pytorch.Linear`."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.__dict__["_engine"] = None  # beside the submodules

    def forward(self, input: Tensor) -> Tensor:
        from transformer_engine import pytorch as engine
        from transformer_engine.common.recipe import Float8CurrentScaling

        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, input.shape[-1])
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE))
        with engine.autocast(enabled=True, recipe=Float8CurrentScaling()):
            output = self._layer()(padded)
        return output[: len(rows)].reshape(*input.shape[:-1], -1)

    def _layer(self) -> Any:
        """The package's layer, with the parameters as they are now: FSDP2 puts others in their place for each call."""
        from transformer_engine import pytorch as engine

        layer: Any = self.__dict__["_engine"]
        if layer is None:
            rows, columns = self.weight.shape  # this rank's, where tensor parallelism has cut them
            layer = self.__dict__["_engine"] = engine.Linear(
                columns, rows, bias=self.bias is not None, params_dtype=self.weight.dtype, device="meta"
            )
        layer._parameters["weight"] = self.weight
        if self.bias is not None:
            layer._parameters["bias"] = self.bias
        return layer.train(self.training)
