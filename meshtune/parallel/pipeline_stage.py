"""One pipeline stage as torch's schedules see it: micro-batches are known by their number, only hidden states travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from meshtune.parallel.stages import Stage

__all__ = ["ScheduledStage"]

Forward = Callable[[Stage, int, Tensor | None], Tensor]


class _Runner(nn.Module):
    """What a schedule calls. It shows torch no submodules, or torch would manage FSDP2's, and take their gradients away when it
    prepares a stage."""

    def __init__(self, stage: Stage, forward: Forward, parameters: Callable[[], Iterator[nn.Parameter]]):
        super().__init__()
        self._stage, self._forward, self._held = stage, forward, parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._held()

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        return self._forward(self._stage, int(number), received[0] if self._stage.index else None)


class ScheduledStage(PipelineStage):
    """`stream` is a meta tensor like the hidden states that travel.

    `before_backward(stage, last)` is called before each backward, `last` of this schedule's run. With `splits_backward` false,
    weights' gradients are computed with those of inputs also where the schedule would do it later.
    """

    def __init__(
        self,
        stage: Stage,
        count: int,
        stream: Tensor,
        device: torch.device,
        group: ProcessGroup,
        forward: Forward,
        parameters: Callable[[], Iterator[nn.Parameter]],
        before_backward: Callable[[Stage, bool], None],
        splits_backward: bool,
    ):
        number, loss = torch.zeros(1, dtype=torch.long), torch.zeros((), requires_grad=True)
        super().__init__(
            _Runner(stage, forward, parameters),
            stage.index,
            count,
            device,
            input_args=stream if stage.index else number,
            output_args=stream if stage.index < count - 1 else loss,
            group=group,
            dw_builder=None if splits_backward else _nothing_left,
        )
        self._stage, self._before_backward = stage, before_backward

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, last_backward: bool = False, **kwargs: Any) -> None:
        self._before_backward(self._stage, last_backward)
        super().backward_one_chunk(bwd_chunk_id, *args, last_backward=last_backward, **kwargs)  # type: ignore[misc]


def _nothing_left() -> Callable[[], None]:
    return lambda: None
