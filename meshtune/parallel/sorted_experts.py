"""Expert parallelism for experts that are called with rows sorted by expert, as many for each, in the place of an index.

Such a module is given every token for every expert, those that are not routed there as rows of zeros. Only rows that are not
zero travel to the ranks that hold their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.layout import Layout
from meshtune.layout.collectives import all_to_all
from meshtune.layout.experts import Experts

__all__ = ["SortedDispatch"]


@dataclass(frozen=True)
class _Route:
    """Where the rows of one call went: `rows` of the input that travel, in order, `sent` and `received` of them to and from
    each rank, and the `places` of those that arrived in the module's input."""

    shape: torch.Size
    rows: Tensor
    sent: list[int]
    received: list[int]
    places: Tensor


class SortedDispatch:
    """The two hooks of one module. Between them it keeps the route of the one call that is running."""

    def __init__(self, experts: Experts, local: int, layout: Layout):
        self._experts, self._local = experts, local
        self._peers, self._layout = layout.peers("ep"), layout
        self._route: _Route | None = None

    @torch.compiler.disable
    def send(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        (whole,) = (*args, *kwargs.values())
        each, rest = divmod(len(whole), self._experts.count)
        if whole.ndim != 2 or rest:
            raise ModelError(
                f"distributed.ep_size: {self._experts.path} was called with {tuple(whole.shape)}, not with as many rows for each "
                f"of its {self._experts.count} experts; write `ep_size: 1`"
            )
        rows = self._own_share(whole.detach().ne(0).any(1).nonzero().flatten())
        experts = rows.div(each, rounding_mode="floor")
        counts = torch.bincount(experts.div(self._local, rounding_mode="floor"), minlength=self._peers.size)
        ones = [1] * self._peers.size
        sent, received = torch.stack([counts, self._peers.all_to_all(counts, ones, ones)]).tolist()
        arrived = all_to_all(whole[rows], sent, received, self._peers)
        places, length = _places(self._peers.all_to_all(experts % self._local, sent, received), self._local)
        self._route = _Route(whole.shape, rows, sent, received, places)
        return (arrived.new_zeros(length, whole.shape[1]).index_add(0, places, arrived),), {}

    @torch.compiler.disable
    def collect(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        route, self._route = self._route, None
        assert route is not None
        returned = all_to_all(output[route.places], route.received, route.sent, self._peers)
        return returned.new_zeros(route.shape[0], returned.shape[1]).index_add(0, route.rows, returned)

    def _own_share(self, rows: Tensor) -> Tensor:
        """Ranks of `tp` have the same rows: each takes its share, and gives zeros for the others."""
        rank, size = self._layout.rank("tp"), self._layout.size("tp")
        return rows[rank * len(rows) // size : (rank + 1) * len(rows) // size]


def _places(experts: Tensor, count: int) -> tuple[Tensor, int]:
    """Of each row, its place where every expert has as many as the one with the most of them; and how many rows that are."""
    each = torch.bincount(experts, minlength=count)
    room = max(int(each.max()), 1)
    order = experts.argsort(stable=True)
    within = torch.empty_like(experts)
    within[order] = torch.arange(len(experts), device=experts.device) - (each.cumsum(0) - each)[experts[order]]
    return experts * room + within, room * count
