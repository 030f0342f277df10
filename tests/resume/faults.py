"""Faults of a run, made to happen: figures that are not finite, losses that stand out, disks that are full or slow."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from meshtune.checkpoint import folder
from meshtune.parallel import Parallel
from meshtune.training import step as step_module
from meshtune.training.reporting import Reporter
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

    def norm(self: Parallel, parameters: Any, *rest: Any) -> torch.Tensor:
        parameters = list(parameters)
        if now[0] in steps and kind == "nan" and rank in (None, dist.get_rank()):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(float("nan"))
            return grad_norm(self, parameters, *rest) * float("nan")
        return grad_norm(self, parameters, *rest)

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


@contextmanager
def full_disk_for(rank: int, path_part: str) -> Iterator[None]:
    """Writing a file whose path holds `path_part` fails on one rank as on a full disk."""
    original = FileSystem.create_stream

    @contextmanager
    def create_stream(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if dist.get_rank() == rank and path_part in str(path) and "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        with original(self, path, mode) as stream:
            yield stream

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystem.create_stream = original  # type: ignore[method-assign]


def train_on_a_full_disk(recipe: dict[str, Any], cache: str, rank: int, path_part: str) -> Outcome:
    with full_disk_for(rank, path_part):
        return train(recipe, cache)


def train_on_a_slow_disk(
    recipe: dict[str, Any], cache: str, seconds: float, stop_after: int | None = None
) -> tuple[Outcome, list[str]]:
    """How the run ended, and what happened on this rank in order: `step N`, `begin .step-N`, `end step-N`. A shard takes
    `seconds` to write."""
    happened: list[str] = []
    stream, begin, publish, on_step = FileSystem.create_stream, folder.begin, folder.publish, Reporter.on_step

    @contextmanager
    def slow(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        if str(path).endswith(".distcp") and "w" in mode:
            time.sleep(seconds)
        with stream(self, path, mode) as opened:
            yield opened

    def noted_begin(run: Path, step: int) -> Path:
        half_written = list((run / "checkpoints").glob("*.incomplete"))
        assert not half_written, f"two at once: {half_written}"
        happened.append(f"begin {step}")
        return begin(run, step)

    def noted_publish(beside: Path, step: int, *rest: Any) -> Path:
        path = publish(beside, step, *rest)
        happened.append(f"end {step}")
        return path

    def noted_step(self: Reporter, state: Any, *rest: Any) -> None:
        on_step(self, state, *rest)
        happened.append(f"step {state.step}")

    FileSystem.create_stream, folder.begin, folder.publish = slow, noted_begin, noted_publish  # type: ignore[method-assign]
    Reporter.on_step = noted_step  # type: ignore[method-assign]
    try:
        return train(recipe, cache, stop_after), happened
    finally:
        FileSystem.create_stream, folder.begin, folder.publish = stream, begin, publish  # type: ignore[method-assign]
        Reporter.on_step = on_step  # type: ignore[method-assign]
