"""When the gradients of pipeline stages are reduced over data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtune.data.batch import Batch
from meshtune.layout import Layout
from meshtune.parallel.reach import reached
from meshtune.parallel.shards import Shards
from meshtune.parallel.stages import Stage, Stages

__all__ = ["DeferredShards", "ReplicatedStages", "ShardedStages", "StageGradients"]

_BUCKET = 2**24  # elements of gradients that are summed at a time


class StageGradients(Protocol):
    """How the gradients of one rank's stages are summed over data parallelism."""

    def begin(self) -> None:
        """Call before the first forward of an optimizer step."""

    def after_forward(self, output: Any) -> None:
        """Call after each forward that carries gradients."""

    def before_backward(self, stage: Stage, last: bool) -> None:
        """Call before each backward of a stage; `last` of the optimizer step for that stage."""

    def settle(self) -> None:
        """Call on every rank after the last backward of a step: then gradients are complete."""


class ReplicatedStages:
    """Copies: gradients are summed after the last backward, a bucket at a time."""

    def __init__(self, root: nn.Module, layout: Layout):
        self._root, self._layout = root, layout

    def begin(self) -> None: ...

    def after_forward(self, output: Any) -> None: ...

    def before_backward(self, stage: Stage, last: bool) -> None: ...

    def settle(self) -> None:
        if self._layout.size("loss") == 1:
            return
        group = self._layout.group("loss")
        parameters = [p for p in self._root.parameters() if p.requires_grad]
        if not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
        for bucket in _buckets([p for p, any_rank in zip(parameters, present.tolist(), strict=True) if any_rank]):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of one dtype, of a bounded number of elements or of one parameter."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class _Shards:
    """What the first forward of every stage reaches, and taking away the gradients of what no rank reaches."""

    def __init__(self, root: nn.Module, layout: Layout):
        self._shards = Shards(root, layout)
        assert isinstance(root, FSDPModule)
        self._root: FSDPModule = root
        self._leaves: set[int] | None = set()

    def after_forward(self, output: Any) -> None:
        if self._leaves is not None:
            self._leaves |= reached(output)

    def settle(self) -> None:
        if self._leaves is not None:
            self._shards.watch(self._leaves)
            self._root.reshard()
            self._leaves = None
        self._shards.settle_gradients()


class ShardedStages(_Shards):
    """FSDP2: shards are reduced at each backward, the copies of HSDP at a stage's last, as without a pipeline.

    The backward of one stage must not reduce what belongs to the rank's other stages.
    """

    def __init__(self, root: nn.Module, model: nn.Module, stages: Stages, layout: Layout):
        super().__init__(root, layout)
        self._stages = stages.local
        self._units = {
            stage.index: [_unit(model.get_submodule(name)) for name in stage.blocks] for stage in stages.local
        }
        inside = {id(m) for units in self._units.values() for unit in units for m in unit.modules()}  # type: ignore[attr-defined]
        self._outer = [m for m in root.modules() if isinstance(m, FSDPModule) and id(m) not in inside]
        self._pending: set[int] = set()

    def begin(self) -> None:
        self._pending = {stage.index for stage in self._stages}

    def before_backward(self, stage: Stage, last: bool) -> None:
        if last:
            self._pending.discard(stage.index)
        self._root.set_is_last_backward(not self._pending)
        for index, units in self._units.items():
            for unit in units:
                unit.set_requires_gradient_sync(index == stage.index)
                unit.set_requires_all_reduce(index == stage.index and last)
        outer_pending = any(other.outer and other.index in self._pending for other in self._stages)
        for unit in self._outer:
            unit.set_requires_gradient_sync(stage.outer, recurse=False)
            unit.set_requires_all_reduce(stage.outer and not outer_pending, recurse=False)


class DeferredShards(_Shards):
    """FSDP2 where gradients of weights are computed later than those of inputs (zero bubble), without FSDP2's own hooks.

    A stage's parameters and gradients stay whole from its first forward to the end of the step; then they are reduced.
    """

    def __init__(self, root: nn.Module, layout: Layout):
        super().__init__(root, layout)
        self._root.set_reshard_after_forward(False)

    def begin(self) -> None:
        self._reduce(False)

    def before_backward(self, stage: Stage, last: bool) -> None: ...

    def settle(self) -> None:
        self._reduce(True)
        ids = torch.zeros((1, 1), dtype=torch.long, device=next(self._root.parameters()).device)  # type: ignore[attr-defined]
        # A backward that reaches nothing: at its end FSDP2 reduces what its hooks have not.
        nothing = self._root(_nothing, Batch(input_ids=ids, position_ids=ids, shift_labels=ids))  # type: ignore[operator]
        nothing.backward()
        super().settle()

    def _reduce(self, now: bool) -> None:
        self._root.set_requires_gradient_sync(now)
        self._root.set_reshard_after_backward(now)
        self._root.set_is_last_backward(now)


def _nothing(_model: nn.Module, batch: Batch) -> Tensor:
    return torch.zeros((), device=batch.input_ids.device, requires_grad=True) * 1


def _unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
