"""Initial values that a model's constructors set and nothing else: on meta they are lost."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import PreTrainedModel

# 16 MiB in float32: scales, biases, tables and whole small models, but no matrix of a large one.
_SMALL = 2**22


class Constructed:
    """The model, built again, small tensors for real and large ones on meta. Nothing is built before the first question."""

    def __init__(self, model: PreTrainedModel, seed: int):
        self.model, self.seed = model, seed

    def value(self, path: str) -> Tensor | None:
        """What the constructor gave the parameter or buffer, or None if that is too large to be built whole."""
        found = self._tensors.get(path)
        return None if found is None or found.is_meta else found.detach()

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), _SmallForReal():
            torch.manual_seed(self.seed)
            model = type(self.model)(copy.deepcopy(self.model.config))
        return {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }


class _SmallForReal(TorchFunctionMode):
    """While active, tensors are made on the CPU up to a size, and on meta beyond it, where code names no device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None:
            large = func(*args, **{**kwargs, "device": "meta"}).numel() > _SMALL
            kwargs["device"] = "meta" if large else "cpu"
        return func(*args, **kwargs)
