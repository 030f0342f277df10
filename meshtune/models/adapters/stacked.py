"""Adapters of experts' stacked weights, in PEFT's own wrapper: W + dW is never made, of no expert.

While the experts' own forward runs, whatever it is, a stand-in is where the weight was. It answers for the weight, and in
products adds what the two small matrices give. Imports PEFT: import this module only where a model has an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from meshtune.models.adapters.variant import NAME

_ALIGNED = 8
"""Ranks are filled up to multiples of it where kernels want rows that begin at multiples of 16 bytes."""


class StackedLora(ParamWrapper):
    """Runs the module inside with a stand-in for its parameter."""

    @classmethod
    def instead_of(cls, wrapper: ParamWrapper) -> StackedLora:
        """The same tensors under the same names."""
        own: StackedLora = object.__new__(cls)
        own.__dict__.update(wrapper.__dict__)
        return own

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        held: Any = self.get_base_layer()._parameters
        weight = held[self.parameter_name]
        stand_in = Updated(weight, *self.factors(weight.dtype))
        held[self.parameter_name] = stand_in.whole() if torch.compiler.is_compiling() else stand_in
        try:
            yield
        finally:
            held[self.parameter_name] = weight

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two matrices (each experts' one after another, if there are several) whose product is the change of the weight."""
        first, second = (cast(Tensor, matrix[NAME].weight) for matrix in (self.lora_A, self.lora_B))
        second = second * self.scaling[NAME]
        if self._param_ndim == 3:
            first = first.unflatten(0, (self.num_experts, -1))  # [experts, r, in]
            second = second.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)  # [experts, out, r]
        if self._param_ndim == 3 and not self._did_swap_in_out_features:
            return first.transpose(-2, -1).to(dtype), second.transpose(-2, -1).to(dtype)
        return second.to(dtype), first.to(dtype)


class Updated:
    """`weight + left @ right`, of shape [..., m, n], without making it. Where more is asked of it than products, it is made."""

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor):
        self._parts = weight, left, right

    def whole(self) -> Tensor:
        weight, left, right = self._parts
        return weight + left @ right

    def __getitem__(self, index: Any) -> Any:
        """A choice in the first of three dimensions, made in each part."""
        first = isinstance(index, int | slice) or (isinstance(index, Tensor) and index.dtype != torch.bool)
        if not first or self._parts[0].ndim != 3:
            return self.whole()[index]
        return Updated(*(part[index] for part in self._parts))

    def transpose(self, first: int, second: int) -> Any:
        if {first % self._parts[0].ndim, second % self._parts[0].ndim} != {
            self._parts[0].ndim - 2,
            self._parts[0].ndim - 1,
        }:
            return self.whole().transpose(first, second)
        weight, left, right = (part.transpose(-2, -1) for part in self._parts)
        return Updated(weight, right, left)

    @property
    def T(self) -> Any:
        return self.transpose(0, 1) if self._parts[0].ndim == 2 else self.whole().T

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def __len__(self) -> int:
        return len(self._parts[0])

    def __matmul__(self, other: Tensor) -> Tensor:
        return _from_the_left(torch.matmul, self, other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return _from_the_right(torch.matmul, other, self)

    def __getattr__(self, name: str) -> Any:
        about = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_meta", "layout", "data_ptr", "is_cuda")
        return getattr(self._parts[0] if name in (*about, "is_floating_point", "requires_grad") else self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        first, second, *rest = cast(Sequence[Any], (*args, None, None))
        if function is F.linear and isinstance(second, Updated) and not isinstance(first, Updated):
            return _linear(first, second, *rest[:-2], **given)
        if function in _PRODUCTS and not given and len(args) == 2:
            product = torch.matmul if function in (Tensor.__matmul__, Tensor.matmul) else function
            if not isinstance(second, Updated):
                return _from_the_left(product, first, second)
            if not isinstance(first, Updated):
                return _from_the_right(product, first, second)
        if function in _GROUPED and isinstance(second, Updated) and not isinstance(first, Updated) and not rest[:-2]:
            return _grouped(function, first, second, given)
        args = [each.whole() if isinstance(each, Updated) else each for each in args]
        return function(
            *args, **{key: each.whole() if isinstance(each, Updated) else each for key, each in given.items()}
        )


_PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm)
_GROUPED = tuple(
    found for found in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if found is not None
)


def _linear(x: Tensor, weight: Updated, bias: Tensor | None = None) -> Tensor:
    whole, left, right = weight._parts
    return F.linear(x, whole, bias) + F.linear(F.linear(x, right), left)


def _from_the_left(product: Callable[[Tensor, Tensor], Tensor], weight: Updated, x: Tensor) -> Tensor:
    whole, left, right = weight._parts
    return product(whole, x) + product(left, product(right, x))


def _from_the_right(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Updated) -> Tensor:
    whole, left, right = weight._parts
    return product(x, whole) + product(product(x, left), right)


def _grouped(function: Callable[..., Tensor], x: Tensor, weight: Updated, given: dict[str, Any]) -> Tensor:
    """Rows of one expert after those of another, `offs` saying where each one's end: x [S, m] by [experts, m, n]."""
    whole, left, right = weight._parts
    strict = x.device.type != "cpu" or x.dtype != torch.float32
    if strict and (missing := -left.shape[-1] % _ALIGNED):
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
    hidden = function(x, left.contiguous(), **given)
    return function(x, whole, **given) + function(hidden, right.contiguous(), **given)


def use_own_stacked(model: nn.Module) -> None:
    """Put these wrappers in the place of PEFT's, before `model` is cut."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is ParamWrapper:
                parent._modules[name] = outer = StackedLora.instead_of(child)
                while type(outer.base_layer) is ParamWrapper:
                    outer.base_layer = outer = StackedLora.instead_of(outer.base_layer)
