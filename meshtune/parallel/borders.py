"""Hooks at the borders of a module: what communicates with other ranks when activations enter and leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["at_entry", "at_exit", "carries_gradient"]


def at_entry(
    module: nn.Module,
    first: Callable[[Tensor], Tensor],
    which: Callable[[Tensor], bool],
    further: Callable[[Tensor], Tensor],
) -> None:
    """Every activation that enters the module: the first, and those after it."""

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen: list[None] = []

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or not which(value):
                return value
            seen.append(None)
            return first(value) if len(seen) == 1 else further(value)

        return tree_map(one, args), tree_map(one, kwargs)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def carries_gradient(value: Tensor) -> bool:
    return value.requires_grad


def at_exit(module: nn.Module, communicate: Callable[[Tensor], Tensor]) -> None:
    """The module's output, or the first of several."""

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return communicate(output)
        return (communicate(output[0]), *output[1:])

    module.register_forward_hook(leave)
