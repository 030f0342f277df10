"""Hooks at the borders of a module: what communicates with other ranks when activations enter and leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["at_entry", "at_exit", "is_activation"]


def at_entry(
    module: nn.Module,
    first: Callable[[Tensor], Tensor],
    which: Callable[[Tensor, Tensor | None], bool],
    further: Callable[[Tensor], Tensor],
) -> None:
    """Every activation that enters the module: the first, and those after it.

    `which` says of a tensor whether it is one, given the first of them, if there was one before it.
    """

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen: list[Tensor] = []

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or not which(value, seen[0] if seen else None):
                return value
            seen.append(value)
            return first(value) if len(seen) == 1 else further(value)

        return tree_map(one, args), tree_map(one, kwargs)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def is_activation(value: Tensor, hidden_states: Tensor | None) -> bool:
    """What carries a gradient; and, since in evaluation nothing does, the first tensor of a call and those shaped like it."""
    if value.requires_grad:
        return True
    return value.is_floating_point() and (hidden_states is None or value.shape == hidden_states.shape)


def at_exit(module: nn.Module, communicate: Callable[[Tensor], Tensor]) -> None:
    """The module's output, or the first of several."""

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return communicate(output)
        return (communicate(output[0]), *output[1:])

    module.register_forward_hook(leave)
