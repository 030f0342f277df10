"""Runs in the ranks of the pool, stopped where a test wants it, and what they leave in the run folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from meshtune.config import from_mapping
from meshtune.errors import MeshtuneError
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import run
from meshtune.training.reporting import Reporter
from meshtune.training.signals import Interrupted

# Differ from run to run of the same training.
MEASURED = ("tokens_per_second", "mfu", "peak_memory_bytes", "step_time_s", "data_wait_s")


@dataclass(frozen=True)
class Outcome:
    """How a run ended on one rank: what it said, the step of a stop, the text of an error and whether all share it."""

    said: str
    stopped_after: int | None = None
    error: str | None = None
    shared: bool = False


def train(recipe: dict[str, Any], cache: str, stop_after: int | None = None, signalled_rank: int = 0) -> Outcome:
    """Run a recipe on this rank. A SIGTERM to one rank makes all of them stop after step `stop_after` (2 or later)."""
    os.environ["MESHTUNE_CACHE"] = cache
    said = io.StringIO()
    with contextlib.redirect_stdout(said), _signal_before(stop_after, signalled_rank):
        try:
            run(from_mapping(Recipe, recipe), "cpu")
        except Interrupted as stop:
            return Outcome(said.getvalue(), stopped_after=stop.step)
        except MeshtuneError as error:
            return Outcome(said.getvalue(), error=f"{type(error).__name__}: {error}", shared=error.shared)
    return Outcome(said.getvalue())


@contextlib.contextmanager
def _signal_before(stop_after: int | None, signalled_rank: int) -> Iterator[None]:
    """A signal that arrives during step N-1 is agreed on with the tokens of step N, the last one."""
    original = Reporter.on_step

    def on_step(self: Reporter, state: Any, *rest: Any) -> None:
        original(self, state, *rest)
        if stop_after is not None and state.step == stop_after - 1 and self.rank == signalled_rank:
            signal.raise_signal(signal.SIGTERM)

    Reporter.on_step = on_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Reporter.on_step = original  # type: ignore[method-assign]


def lines(run_folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is measured."""
    text = (run_folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


def losses(run_folder: Path) -> dict[int, float]:
    """Step to training loss."""
    return {row["step"]: row["loss"] for row in lines(run_folder) if "loss" in row}


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    state: dict[str, Tensor] = {}
    reader = FileSystemReader(checkpoint)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))


def checkpoint(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step}"
