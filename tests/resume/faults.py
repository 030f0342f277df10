"""Faults of a run, made to happen: figures that are not finite, losses that stand out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshtune.parallel import Parallel
from meshtune.training import step as step_module
from meshtune.training.step import TrainStep
from tests.resume.runs import Outcome, train


@contextmanager
def poisoned(steps: Sequence[int], kind: str = "nan", rank: int | None = None) -> Iterator[None]:
    """At each of `steps`, counted from 1 and whenever they come, all gradients are NaN and the gradient norm says so (`nan`),
    on one rank alone or on all; or the loss is ten times what it is (`spike`)."""
    call, grad_norm, total_loss = TrainStep.__call__, Parallel.grad_norm, step_module.total_loss
    now = [0]

    def counted(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        now[0] = step + 1
        try:
            return call(self, batches, step, rate)
        finally:
            now[0] = 0

    def norm(self: Parallel, parameters: Any) -> torch.Tensor:
        parameters = list(parameters)
        if now[0] in steps and kind == "nan" and rank in (None, dist.get_rank()):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(float("nan"))
            return grad_norm(self, parameters) * float("nan")
        return grad_norm(self, parameters)

    def loss(loss_sum: torch.Tensor, layout: Any) -> torch.Tensor:
        return total_loss(loss_sum, layout) * (10.0 if now[0] in steps and kind == "spike" else 1.0)

    TrainStep.__call__, Parallel.grad_norm, step_module.total_loss = counted, norm, loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainStep.__call__, Parallel.grad_norm, step_module.total_loss = call, grad_norm, total_loss  # type: ignore[method-assign]


def train_poisoned(
    recipe: dict[str, Any], cache: str, steps: Sequence[int], kind: str = "nan", rank: int | None = None
) -> Outcome:
    with poisoned(steps, kind, rank):
        return train(recipe, cache)
