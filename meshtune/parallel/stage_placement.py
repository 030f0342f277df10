"""Which pipeline stage has which module: blocks by cost, and what runs before, beside or after them by what it feeds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshtune.parallel.stage_costs import cost, partition
from meshtune.parallel.trunk import Trunk

__all__ = ["Placement", "place"]


@dataclass(frozen=True)
class Placement:
    """The same on every rank. Stage `s` is on pipeline rank `s % ranks`.

    `blocks` are the names of each stage's blocks; `outer` the stages of every other module that is no ancestor of a block;
    `holders` the ranks of every parameter by its name; `canonical` the first name of the same parameter, another one where
    weights are tied.
    """

    ranks: int
    blocks: tuple[tuple[str, ...], ...]
    outer: dict[str, tuple[int, ...]]
    holders: dict[str, tuple[int, ...]]
    canonical: dict[str, str]

    def ranks_of(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({stage % self.ranks for stage in stages}))

    def absent(self, rank: int) -> tuple[str, ...]:
        """Names of the modules that `rank` is without."""
        blocks = [name for stage, names in enumerate(self.blocks) if stage % self.ranks != rank for name in names]
        return (*blocks, *(path for path, stages in self.outer.items() if rank not in self.ranks_of(stages)))


def place(
    model: Any, trunk: Trunk, ranks: int, stages: int, active_share: float, joined: Collection[str] = ()
) -> Placement:
    """Cut `trunk`'s blocks into `stages`, none of which begins with a block in `joined`, and find a place for everything else."""
    order = trunk.order
    inner = {name[:dot] for name in order for dot, mark in enumerate(name) if mark == "."} | {""}
    paths = [path for path, _ in model.named_modules() if path not in inner and path not in order]
    outer = {
        path: _stages_of(model.get_submodule(path), model, trunk, stages)
        for path in paths
        if path.rpartition(".")[0] in inner
    }
    first, last = (
        sum(cost(model.get_submodule(path), active_share) for path, at in outer.items() if at == (stage,))
        for stage in (0, stages - 1)
    )
    costs = [cost(model.get_submodule(name), active_share) for name in order]
    within = [i for i, name in enumerate(order) if name in joined]
    blocks = tuple(tuple(order[i] for i in part) for part in partition(costs, stages, first, last, within))
    at = {**outer, **{name: (stage,) for stage, names in enumerate(blocks) for name in names}}
    holders: dict[str, tuple[int, ...]] = {}
    canonical: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = next((path for path in _prefixes(name) if path in at), None)
        everywhere = tuple(range(ranks))
        holders[name] = tuple(sorted({stage % ranks for stage in at[path]})) if path is not None else everywhere
        canonical[name] = known.setdefault(id(parameter), name)
    return Placement(ranks, blocks, outer, holders, canonical)


def _stages_of(module: nn.Module, model: Any, trunk: Trunk, stages: int) -> tuple[int, ...]:
    """The first stage, the last, or all of them: what feeds blocks beside their hidden states is needed by each."""
    own = {id(parameter) for parameter in module.parameters()}
    inside = set(module.modules())
    everywhere, last = tuple(range(stages)), (stages - 1,)
    if not own or own & trunk.side:
        return everywhere
    if model.get_output_embeddings() in inside:
        return last
    if not trunk.known:
        return everywhere
    if module is model.get_input_embeddings():
        return (0,)
    if own & trunk.entry:
        # What this feeds is computed in vain on later stages. Only of an embedding is the shape of the output known.
        return (0,) if isinstance(module, nn.Embedding) and own <= trunk.entry else everywhere
    return last


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
