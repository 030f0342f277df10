"""Cut a model into pipeline stages: each rank keeps its blocks and what runs before, beside or after them.

Names stay those of the whole model. A parameter that several ranks hold (tied embeddings, per-layer inputs) has the same value
on each; its gradients are summed once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshtune.errors import LayoutError, ModelError
from meshtune.layout import Layout
from meshtune.layout.span import Span
from meshtune.parallel.stage_placement import Placement, place
from meshtune.parallel.stand_ins import AbsentBlock, AbsentEmbedding, AbsentModule
from meshtune.parallel.trunk import trace

__all__ = ["STAGES_PER_RANK", "Shared", "Stage", "Stages", "cut"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2}


@dataclass(frozen=True)
class Stage:
    """One stage of this rank: its place among all, its blocks, how the model runs it, and whether it has parameters outside
    blocks."""

    index: int
    blocks: tuple[str, ...]
    span: Span
    outer: bool


@dataclass(frozen=True)
class Shared:
    """A parameter that several pipeline `ranks` hold, in order, and by what `name` this one has it."""

    ranks: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Stages:
    """What one rank holds of a pipeline of `count` stages."""

    count: int
    rank: int
    local: tuple[Stage, ...]
    shared: tuple[Shared, ...]
    placement: Placement

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of this rank's blocks, in the order in which they run."""
        return tuple(name for stage in self.local for name in stage.blocks)

    @property
    def entry(self) -> str:
        """The model's first block, here or absent."""
        return self.placement.blocks[0][0]

    def holds(self, name: str) -> bool:
        """Whether the parameter `name` of the whole model is on this rank."""
        return self.rank in self.placement.holders[name]

    def counts(self, name: str) -> bool:
        """Whether this rank is the first of those that hold the parameter `name`, under whatever name: what is summed over
        stages counts it here."""
        canonical, holders = self.placement.canonical, self.placement.holders
        return self.rank == min(min(holders[other]) for other, first in canonical.items() if first == canonical[name])


def cut(
    root: nn.Module,
    model: nn.Module,
    blocks: Sequence[str],
    layout: Layout,
    schedule: str = "1f1b",
    *,
    embedding_dtype: torch.dtype | None = None,
    active_share: float = 1.0,
    joined: Collection[str] = (),
    wrapped: Mapping[str, str] | None = None,
) -> Stages:
    """Keep this rank's stages of `model`, in place, and say what they are. Call it on the meta device, before anything else.

    Args:
        root: called as `root(objective, batch, span, received)`; it contains `model`.
        blocks: qualified names of the decoder layers in `model`.
        layout: cut over its axis `pp`.
        schedule: a value of `distributed.pp_schedule`.
        embedding_dtype: of the embedding's output, where that is not the dtype of its weight (mixed precision).
        active_share: of stacked experts' parameters, what one token meets.
        joined: blocks that must be on one stage with the one before them.
        wrapped: where modules stand that the model knows by another path.

    Raises LayoutError if there are fewer layers than stages, and ModelError if a layer runs more than once.
    """
    ranks, per_rank = layout.size("pp"), STAGES_PER_RANK[schedule]
    trunk = trace(root, model, blocks)
    if repeated := [name for name in dict.fromkeys(trunk.order) if trunk.order.count(name) > 1]:
        raise ModelError(
            f"distributed.pp_size: {type(model).__name__} runs {', '.join(repeated[:3])} more than once in a forward, so that "
            "it has no first and last stage; write pp_size: 1"
        )
    groups = len(trunk.order) - len(joined)
    if groups < ranks * per_rank:
        raise LayoutError(_too_few(groups, ranks, schedule, bool(joined)))
    placement = place(model, trunk, ranks, ranks * per_rank, active_share, joined)
    rank = layout.rank("pp")
    local = tuple(_stage(model, placement, rank + ranks * i, embedding_dtype) for i in range(per_rank))
    _put_stand_ins(model, placement, rank, embedding_dtype)
    _keep_ties_within(model, placement, rank, wrapped or {})
    return Stages(ranks * per_rank, rank, local, _shared(placement, rank), placement)


def _too_few(layers: int, ranks: int, schedule: str, joined: bool) -> str:
    per_rank = STAGES_PER_RANK[schedule]
    on_each = f" with {per_rank} stages on each ({schedule})" if per_rank > 1 else ""
    most = max(1, layers // per_rank)
    simpler = ", or pp_schedule: 1f1b" if per_rank > 1 and layers >= ranks else ""
    what = "groups of layers that share nothing but hidden states" if joined else "layers to cut"
    return (
        f"distributed.pp_size: {ranks} ranks{on_each} are {ranks * per_rank} stages, but the model has {layers} {what}; "
        f"write pp_size: {most}{' or less' if most > 1 else ''}{simpler}"
    )


def _stage(model: Any, placement: Placement, index: int, embedding_dtype: torch.dtype | None) -> Stage:
    """In the pass of one stage, the other stages of the same rank are absent, too."""
    blocks, ranks, last = placement.blocks[index], placement.ranks, len(placement.blocks) - 1
    earlier = [name for other in range(index % ranks, index, ranks) for name in placement.blocks[other]]
    replaced: dict[str, nn.Module] = {name: AbsentBlock(model.get_submodule(name)) for name in earlier}
    for path, stages in placement.outer.items():
        if stages == (0,) and earlier and index % ranks == 0:
            replaced[path] = AbsentEmbedding(model.get_submodule(path), embedding_dtype)
    span = Span(blocks[0] if index else None, blocks[-1] if index < last else None, replaced)
    within = [path for path, stages in placement.outer.items() if index in stages]
    outer = any(True for path in within for _ in model.get_submodule(path).parameters())
    return Stage(index, blocks, span, outer or any(len(ranks) > 1 for ranks in placement.holders.values()))


def _put_stand_ins(model: Any, placement: Placement, rank: int, dtype: torch.dtype | None) -> None:
    blocks = {name for names in placement.blocks for name in names}
    for path in placement.absent(rank):
        original = model.get_submodule(path)
        model.set_submodule(path, _stand_in(original, path in blocks, placement.outer.get(path) == (0,), dtype))
        original.to("meta")


def _stand_in(original: nn.Module, block: bool, first: bool, dtype: torch.dtype | None) -> nn.Module:
    if block:
        return AbsentBlock(original)
    return AbsentEmbedding(original, dtype) if first else AbsentModule(original)


def _shared(placement: Placement, rank: int) -> tuple[Shared, ...]:
    names: dict[str, list[str]] = {}
    for name, first in placement.canonical.items():
        names.setdefault(first, []).append(name)
    found = []
    for same in names.values():
        ranks = tuple(sorted({holder for name in same for holder in placement.holders[name]}))
        here = [name for name in same if rank in placement.holders[name]]
        if len(ranks) > 1 and here:
            found.append(Shared(ranks, here[0]))
    return tuple(found)


def _keep_ties_within(model: Any, placement: Placement, rank: int, wrapped: Mapping[str, str]) -> None:
    """Tell a transformers model of those ties only whose two ends are on this rank: it ties again when it is loaded."""

    def is_here(name: str) -> bool:
        path, _, leaf = name.rpartition(".")
        return rank in placement.holders.get(f"{wrapped.get(path, path)}.{leaf}", (rank,))

    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    kept = {a: b for a, b in ties.items() if is_here(a) and is_here(b)}
    if kept == ties:
        return
    for module in model.modules():
        if not isinstance(module, AbsentModule) and getattr(module, "_tied_weights_keys", None):
            module._tied_weights_keys = None
    model.all_tied_weights_keys = kept
    model._tied_weights_keys = dict(kept) or None
