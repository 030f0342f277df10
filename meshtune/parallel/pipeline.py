"""Pipeline parallelism: the micro-batches of an optimizer step through the stages of a model, in the order of a schedule.

Every rank of a pipeline has the same micro-batches, and every stage runs the same objective on them. Only hidden states travel:
a stage is given a micro-batch's number and finds it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from meshtune.data.batch import Batch
from meshtune.data.collate import as_filler
from meshtune.data.padding import alike
from meshtune.errors import MeshtuneError, ModelError
from meshtune.layout import Layout
from meshtune.parallel.pipeline_stage import ScheduledStage
from meshtune.parallel.shared_parameters import copy_shared, sum_shared
from meshtune.parallel.stage_gradients import DeferredShards, ReplicatedStages, ShardedStages, StageGradients
from meshtune.parallel.stages import STAGES_PER_RANK, Stage, Stages
from meshtune.parallel.stand_ins import AbsentEmbedding

__all__ = ["Pipeline", "problems"]

Objective = Callable[[Any, Any], Any]

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
}
_ZERO_BUBBLE = "interleaved_zero_bubble"


def problems(
    ranks: int, schedule: str, microbatches: int | None, accumulation: int, compiled: bool = False
) -> Iterator[tuple[str, str]]:
    """(key, message) of what a pipeline of `ranks` cannot do with `accumulation` micro-batches in an optimizer step."""
    together = microbatches or accumulation
    if accumulation % together:
        yield (
            "distributed.pp_microbatches",
            f"{together} must divide the {accumulation} micro-batches of an optimizer step; write a divisor of it, or "
            "change training.global_batch_size or training.per_device_batch_size",
        )
    elif schedule == "1f1b" and together < ranks:
        yield (
            "distributed.pp_schedule",
            f"1f1b needs {ranks} micro-batches or more to go through {ranks} stages together, found {together}; lower "
            "training.per_device_batch_size, or write `gpipe`",
        )
    elif STAGES_PER_RANK[schedule] > 1 and together % (rounds := max(1, together // ranks)):
        yield (
            "distributed.pp_microbatches",
            f"{schedule} sends micro-batches through {ranks} ranks in {rounds} rounds, which must divide their number, found "
            f"{together}; write a multiple of {ranks}",
        )
    if schedule == _ZERO_BUBBLE and compiled:
        yield (
            "distributed.pp_schedule",
            f"{schedule} computes gradients of weights apart from those of inputs, which torch.compile cannot; write "
            "`interleaved_1f1b`, or `compile: false`",
        )


@dataclass
class _Work:
    """What the stages are at."""

    objective: Objective
    batches: list[Batch]
    scale: float
    loss_sum: Tensor
    stream: Tensor
    last: bool = False


class Pipeline:
    """Trains and evaluates the stages that `cut` left of `model` in `root`, after data parallelism was applied to them.

    `root` is called as `root(objective, batch, span, received)`.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        stages: Stages,
        layout: Layout,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """`microbatches` go through the stages together, all of an optimizer step if None; `around_forward` is open in each
        forward (autocast)."""
        self._around = around_forward
        self._root, self._model, self._stages, self._layout = root, model, stages, layout
        self._name, self._together = schedule, microbatches
        self._gradients = _stage_gradients(root, model, stages, layout, schedule)
        self._device = next(model.parameters()).device
        replaced = [module for stage in stages.local for module in stage.span.replaced.values()]
        for module in (*model.modules(), *replaced):
            if isinstance(module, AbsentEmbedding):
                module.device = self._device
        self._schedule: tuple[tuple[Any, ...], Any] | None = None
        self._work: _Work | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss; on the others it is 0."""
        return any(stage.index == self._stages.count - 1 for stage in self._stages.local)

    def share_values(self) -> None:
        """Call once after weights are loaded: a parameter of several stages has its value from the first of them."""
        copy_shared(self._model, self._stages.shared, self._layout)

    def train(self, objective: Objective, batches: Sequence[Batch], scale: float) -> Tensor:
        """Forward and backward of `scale` times the loss of all micro-batches of an optimizer step; gradients are then summed
        over data parallelism and complete. Returns the sum of losses of this rank's batches, float64 0-d, 0 on all stages but
        the last.

        `batches` are the same on every rank of the pipeline. They are padded to one shape.
        """
        made = self._as_many_as_fit(alike(batches))
        together = self._together or len(made)
        work = self._work = _Work(objective, [], scale, self._zero(), self._stream(made[0]))
        self._gradients.begin()
        for start in range(0, len(made), together):
            work.batches, work.last = made[start : start + together], start + together == len(made)
            self._run(work)
        self._work = None
        self._gradients.settle()
        sum_shared(self._model, self._stages.shared, self._layout)
        return work.loss_sum

    def _as_many_as_fit(self, batches: list[Batch]) -> list[Batch]:
        """With micro-batches of nothing in the place of those that a short global batch lacks for the schedule."""
        ranks, have = self._layout.size("pp"), len(batches)
        counts = range(have, have + (self._together or ranks) + 1)
        fitting = (n for n in counts if not any(problems(ranks, self._name, self._together, n)))
        return [*batches, *[as_filler(batches[-1])] * (next(fitting, have) - have)]

    @torch.no_grad()
    def evaluate(self, objective: Objective, batch: Batch) -> Tensor:
        """What `objective` gives for a micro-batch in the place of its loss sum; 0 on all stages but the last."""
        loss_sum, group, ranks = self._zero(), self._layout.group("pp"), self._layout.size("pp")
        stream = self._stream(batch)
        for stage in self._stages.local:
            received = None
            if stage.index:
                received = torch.empty_like(stream, device=self._device)
                dist.recv(received, group=group, group_src=(stage.index - 1) % ranks)
            output = self._call(objective, batch, stage.span, received)
            if stage.index == self._stages.count - 1:
                loss_sum = loss_sum + output[0].detach()
            else:
                sent = self._checked(output, stream).contiguous()
                dist.send(sent, group=group, group_dst=(stage.index + 1) % ranks)
        return loss_sum

    def _run(self, work: _Work) -> None:
        """One run of the schedule, over micro-batches that go through the stages together."""
        schedule = self._prepared(work)
        numbers = torch.arange(len(work.batches))
        first = any(stage.index == 0 for stage in self._stages.local)
        given = (numbers,) if first else ()
        try:
            schedule.step(*given, number=numbers, target=numbers if self.is_last else None, return_outputs=False)
        except RuntimeError as error:
            if (cause := _cause(error)) is not None:
                raise cause from None
            raise

    def _prepared(self, work: _Work) -> Any:
        """The schedule for micro-batches of this shape. Its buffers are those of one shape."""
        count, stream = len(work.batches), work.stream
        key = count, stream.shape, stream.dtype
        if self._schedule is None or self._schedule[0] != key:
            parts = [self._scheduled(stage, stream) for stage in self._stages.local]
            schedule = _SCHEDULES[self._name](
                parts if STAGES_PER_RANK[self._name] > 1 else parts[0], count, loss_fn=_as_it_is, scale_grads=False
            )
            self._schedule = key, schedule
        return self._schedule[1]

    def _scheduled(self, stage: Stage, stream: Tensor) -> ScheduledStage:
        others = [f"{name}." for other in self._stages.local if other is not stage for name in other.blocks]

        def parameters() -> Iterator[nn.Parameter]:
            named = self._model.named_parameters()
            return (p for name, p in named if not any(name.startswith(other) for other in others))

        return ScheduledStage(
            stage,
            self._stages.count,
            stream,
            self._device,
            self._layout.group("pp"),
            self._forward,
            parameters,
            self._before_backward,
            # The loss keeps its gradients for one backward.
            splits_backward=self._name == _ZERO_BUBBLE and stage.index < self._stages.count - 1,
        )

    def _forward(self, stage: Stage, number: int, received: Tensor | None) -> Tensor:
        work = self._work
        assert work is not None
        batch = work.batches[number]
        output = self._call(work.objective, batch, stage.span, received)
        self._gradients.after_forward(output)
        if stage.index < self._stages.count - 1:
            return self._checked(output, work.stream)
        work.loss_sum += output[0].detach()
        return output[0] * work.scale

    def _call(self, *args: Any) -> Any:
        with self._around():
            return self._root(*args)

    def _before_backward(self, stage: Stage, last: bool) -> None:
        assert self._work is not None
        self._gradients.before_backward(stage, last and self._work.last)

    @torch.no_grad()
    def _stream(self, batch: Batch) -> Tensor:
        """A meta tensor like the hidden states between blocks, as the first block is given them.

        Asked anew at each step: the root's parameters are gathered here, and ranks of several pipelines that gather them at
        different moments, one here and one when it has received its first hidden states, would wait for each other for ever.
        """
        found = self._call(_input_of(self._stages.entry), batch)
        return torch.empty(found.shape, dtype=found.dtype, device="meta", requires_grad=True)

    def _checked(self, output: Tensor, stream: Tensor) -> Tensor:
        if output.shape != stream.shape or output.dtype != stream.dtype:
            raise ModelError(
                f"distributed.pp_size: {type(self._model).__name__} hands hidden states of shape {tuple(output.shape)} in "
                f"{output.dtype} from layer to layer, but {tuple(stream.shape)} in {stream.dtype} to its first; such a model "
                "cannot be cut into stages; write pp_size: 1"
            )
        return output

    def _zero(self) -> Tensor:
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        return torch.zeros((), dtype=dtype, device=self._device)


def _stage_gradients(
    root: nn.Module, model: nn.Module, stages: Stages, layout: Layout, schedule: str
) -> StageGradients:
    if not isinstance(root, FSDPModule):
        return ReplicatedStages(root, layout)
    return DeferredShards(root, layout) if schedule == _ZERO_BUBBLE else ShardedStages(root, model, stages, layout)


def _input_of(block: str) -> Objective:
    return lambda model, batch: model.input_of(block, batch.input_ids, batch.position_ids, batch.attention_mask)


def _as_it_is(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


def _cause(error: BaseException | None) -> MeshtuneError | None:
    """The error of ours that a stage raised, which schedules wrap."""
    while error is not None and not isinstance(error, MeshtuneError):
        error = error.__cause__
    return error
