"""A layout in words: the mesh, who shares what with whom, and where every parameter of a model lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshtune.layout.axes import AXES
from meshtune.layout.layout import Layout
from meshtune.layout.plan import Plan

_SHOWN_GROUPS = 8
_SHOWN_RANKS = 64
_VIEWS = {
    "tp": "cut a layer between them",
    "cp": "cut a sequence between them",
    "ep": "have different experts",
    "efsdp": "shard the same experts",
    "fsdp": "shard a dense parameter",
    "dp_replicate": "hold the same shards",
    "batch": "read different rows",
    "pp": "hold different layers",
}


@dataclass(frozen=True)
class Placed:
    """Where one parameter lies. `local_shape` and `bytes` are those of the rank that holds most."""

    name: str
    shape: tuple[int, ...]
    placement: dict[str, str]
    local_shape: tuple[int, ...]
    bytes: int
    reduction: str

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "local_shape": list(self.local_shape)}


def placed(
    layout: Layout,
    plan: Plan,
    parameters: Iterable[tuple[str, tuple[int, ...], int]],
    stage_of: Callable[[str], str] = lambda name: "",
    trained: Callable[[str], bool] = lambda name: True,
) -> Iterator[Placed]:
    """For each (name, shape, bytes of an element) of a model. `stage_of` tells the pipeline stages that hold a parameter,
    `trained` whether it gets a gradient."""
    experts = (
        {name: (found, cut) for found in plan.experts for name, cut in found.cuts().items()} if layout.ep > 1 else {}
    )
    inside = tuple(f"{unit}." for unit in plan.units)
    for name, shape, width in parameters:
        placement, local = {}, list(shape)
        if layout.size("pp") > 1:
            placement["pp"] = stage_of(name)
        if name in experts:
            found, shared_out = experts[name]
            local = list(shared_out.piece(tuple(shape), layout.ep, 0).local_shape)
            placement["ep"] = f"Shard({shared_out.dim}), {found.count} experts"
        elif (cut := plan.cuts.get(name)) is not None and layout.size("tp") > 1:
            local = list(cut.piece(tuple(shape), layout.size("tp"), 0).local_shape)
            placement["tp"] = f"Shard({cut.dim % len(shape)})" + (
                f" of each of {len(cut.blocks)} blocks" * (len(cut.blocks) > 1)
            )
        elif layout.size("tp") > 1:
            placement["tp"] = "Replicate"
        view = "efsdp" if name in experts else "fsdp"
        if layout.strategy != "ddp" and layout.size(view) > 1:
            local[0] = math.ceil(local[0] / layout.size(view)) if local else 1
            placement[view] = "Shard(0)"
        partial = (name in plan.shared or (layout.sequence_parallel and name.startswith(inside))) and "tp" in placement
        partial = partial and placement["tp"] == "Replicate"
        reduction = _reduction(layout, view, partial) if trained(name) else "none, it is frozen"
        yield Placed(name, tuple(shape), placement, tuple(local), math.prod(local) * width, reduction)


def _reduction(layout: Layout, view: str, partial: bool) -> str:
    steps = []
    if layout.strategy == "ddp":
        steps += [f"all-reduce over {layout.size('loss')} ranks"] * (layout.size("loss") > 1)
    else:
        steps += [f"reduce-scatter over {view} {layout.size(view)}"] * (layout.size(view) > 1)
        steps += [f"all-reduce over dp_replicate {layout.size('dp_replicate')}"] * (layout.size("dp_replicate") > 1)
    steps += [f"sum over tp {layout.size('tp')}, once a step"] * partial
    return ", ".join(steps) or "none"


def drawing(layout: Layout) -> list[str]:
    """The mesh: its axes, the place of every rank, and who shares what with whom."""
    used = [axis for axis in AXES if layout.degrees[axis] > 1]
    lines = [layout.summary()]
    if layout.world_size == 1:
        return lines
    columns = [*used, *(["efsdp", "ep"] if layout.ep > 1 else [])]
    lines.append("  rank  " + "  ".join(columns))
    for rank in range(min(layout.world_size, _SHOWN_RANKS)):
        place = layout.coordinates(rank)
        lines.append(f"  {rank:>4}  " + "  ".join(f"{place[axis]:>{len(axis)}}" for axis in columns))
    if layout.world_size > _SHOWN_RANKS:
        lines.append(f"  ... and {layout.world_size - _SHOWN_RANKS} more")
    for view, what in _VIEWS.items():
        if layout.size(view) > 1 and (view not in ("ep", "efsdp") or layout.ep > 1):
            lines.append(f"  {view} {layout.size(view)}: {_groups(layout.groups(view))} {what}")
    return lines


def _groups(groups: list[list[int]]) -> str:
    shown = ", ".join("[" + " ".join(map(str, group)) + "]" for group in groups[:_SHOWN_GROUPS])
    return shown if len(groups) <= _SHOWN_GROUPS else f"{shown}, ... ({len(groups)} groups)"
