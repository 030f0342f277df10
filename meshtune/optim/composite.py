"""Several optimizers as one, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from meshtune.optim import kept as keeping
from meshtune.optim.bare import BareOptimizer
from meshtune.optim.kept import StateTensor

__all__ = ["Composite"]


class Composite(BareOptimizer):
    """Steps `parts` one after another; its groups are theirs."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups])
        self.parts = tuple(parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def kept(self) -> Iterator[StateTensor]:
        """What all of them keep."""
        for part in self.parts:
            yield from keeping.kept(part)

    def make(self, names: Mapping[nn.Parameter, str], stored: Collection[str]) -> None:
        """Give those parameters a state to be filled whose names are among `stored`."""
        for part in self.parts:
            keeping.make(part, names, stored)

    def bytes_kept(self, parameter: nn.Parameter, shape: tuple[int, ...], itemsize: int) -> int:
        """What the one that has `parameter` keeps for it."""
        return sum(
            keeping.state_bytes(part, parameter, shape, itemsize)
            for part in self.parts
            if any(parameter is own for group in part.param_groups for own in group["params"])
        )
