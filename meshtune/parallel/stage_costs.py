"""Where to cut a row of blocks so that the dearest pipeline stage is as cheap as can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from torch import nn

__all__ = ["cost", "partition"]


def cost(module: nn.Module, active_share: float = 1.0) -> float:
    """Weights of matrices, to which compute, memory and gradients are all proportional.

    Of stacked experts [E, ...] only `active_share` meets a token; vectors are left out. A module that holds its matrix in another
    form says how many weights it stands for (`dense_numel`).
    """
    sizes: dict[int, float] = {}
    for one in module.modules():
        if (dense := getattr(one, "dense_numel", None)) is not None:
            sizes[id(one)] = dense
            continue
        matrices = (p for p in one._parameters.values() if p is not None and p.ndim > 1)
        sizes.update({id(p): p.numel() * (active_share if p.ndim > 2 else 1.0) for p in matrices})
    return sum(sizes.values())


def partition(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, joined: Collection[int] = ()
) -> list[range]:
    """Consecutive blocks of each of `stages`, at least one, with the smallest possible cost of the dearest stage.

    `first` and `last` are what the first stage has before its blocks and the last one after its own; no stage begins with a
    block in `joined`. Among equally good cuts the most even one (least sum of squares) is taken, and among those the one that
    gives earlier stages fewer blocks.
    """
    count = len(costs)
    borders = [block for block in range(1, count) if block not in joined]
    if not 1 <= stages <= len(borders) + 1:
        raise ValueError(f"{len(borders) + 1} groups of blocks cannot be cut into {stages} stages")
    before = list(itertools.accumulate(costs, initial=0.0))

    def load(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    stops = [*borders, count]
    dearest, _ = _best(stops, stages, load, max)
    bound = dearest * (1 + 1e-9)
    _, cuts = _best(stops, stages, load, lambda total, more: total + (more**2 if more <= bound else float("inf")))
    return [range(start, stop) for start, stop in itertools.pairwise((0, *cuts))]


def _best(
    stops: Sequence[int], stages: int, load: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least value that `join` makes of the stages' loads, in order, from 0, and where each stage then stops: at one of
    `stops`, the last stage at the last of them."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        reachable = stops[stage : len(stops) - (stages - stage - 1)]
        best = {
            stop: min(
                (join(value, load(stage, start, stop)), (*cuts, stop))
                for start, (value, cuts) in best.items()
                if start < stop
            )
            for stop in reachable
        }
    return best[stops[-1]]
