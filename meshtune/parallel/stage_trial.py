"""Whether a model survives being cut into pipeline stages: tried in one process, stage after stage, on a small one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.data.batch import Batch
from meshtune.errors import MeshtuneError
from meshtune.layout import Layout
from meshtune.parallel.stages import Stages, cut

__all__ = ["fault_of_stages", "in_turn", "pipeline_ranks"]

Objective = Callable[[Any, Batch], Any]
_MOST_STAGES = 12
_TOLERANCE = 1e-3  # of the norm of the gradients; a wrong cut is wrong by their size


@dataclass(frozen=True)
class _PipelineRank(Layout):
    """One rank of a pipeline that has no other process."""

    pp_rank: int = 0

    def rank(self, name: str) -> int:
        return self.pp_rank if name == "pp" else 0


def pipeline_ranks(ranks: int) -> list[Layout]:
    """The layout of a pipeline as each of its ranks sees it. Sizes and ranks can be asked, groups cannot."""
    degrees = {"pp": ranks, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    return [_PipelineRank(degrees, pp_rank=rank) for rank in range(ranks)]


def in_turn(parts: Iterable[tuple[nn.Module, Stages]], objective: Objective, batch: Batch) -> Tensor:
    """The loss sum of a batch through all stages, with gradients in their parameters, each stage a graph of its own."""
    passes = [(stage, root) for root, stages in parts for stage in stages.local]
    received: Tensor | None = None
    outputs: list[tuple[Tensor | None, Tensor]] = []
    for stage, root in sorted(passes, key=lambda item: item[0].index):
        result = root(objective, batch, stage.span, received)
        output = result if stage.span.leave is not None else result[0]
        outputs.append((received, output))
        received = output.detach().requires_grad_()
    gradient: Tensor | None = None
    for received, output in reversed(outputs):
        output.backward(gradient)
        gradient = None if received is None else received.grad
    return outputs[-1][1].detach()


def fault_of_stages(
    build: Callable[[], tuple[nn.Module, nn.Module]],
    blocks: Callable[[nn.Module], Sequence[str]],
    objective: Objective,
    batch: Batch,
    joined: Collection[str] = (),
) -> str | None:
    """What goes wrong if a model is cut between its layers, or None: loss and gradients are then those of the whole.

    `build` gives (root, model), each time anew and with the same weights. Blocks in `joined` stay with the one before them. A
    model with many layers is cut in some places only.
    """
    root, whole = build()
    wanted = root(objective, batch)[0]
    wanted.backward()
    names = blocks(whole)
    try:
        ranks = min(len(names) - len(joined), _MOST_STAGES)
        parts = [_part(build, blocks, layout, joined) for layout in pipeline_ranks(ranks)]
        found = in_turn([(root, stages) for root, _, stages in parts], objective, batch)
    except MeshtuneError as error:
        return str(error)
    except Exception as error:
        return f"layers need more than hidden states of the layers before them ({type(error).__name__}: {error})"
    if not torch.allclose(found, wanted.detach(), rtol=_TOLERANCE, atol=_TOLERANCE):
        return f"the loss of its stages is {float(found):.6g}, that of the whole {float(wanted):.6g}"
    return _gradient_fault(whole, parts)


def _part(
    build: Callable[[], tuple[nn.Module, nn.Module]],
    blocks: Callable[[nn.Module], Sequence[str]],
    layout: Layout,
    joined: Collection[str],
) -> tuple[nn.Module, nn.Module, Stages]:
    root, model = build()
    return root, model, cut(root, model, blocks(model), layout, "gpipe", joined=joined)


def _gradient_fault(whole: nn.Module, parts: list[tuple[nn.Module, nn.Module, Stages]]) -> str | None:
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    found: dict[str, Tensor] = {}
    for _, model, stages in parts:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                canonical = stages.placement.canonical[name]
                found[canonical] = found.get(canonical, 0) + parameter.grad
    scale = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in wanted.items():
        off = (gradient - found.get(name, torch.zeros_like(gradient))).norm()
        if off > _TOLERANCE * torch.maximum(gradient.norm(), 1e-2 * scale):
            return f"the gradient of {name} is another one when its layers are cut apart"
    return None
