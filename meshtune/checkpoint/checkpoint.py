"""Save and load model and optimizer with torch.distributed.checkpoint, sharded, on any number of ranks.

Names are those of the transformers model, so a checkpoint of one layout loads into another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from meshtune.checkpoint import folder
from meshtune.errors import CheckpointError

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Writes a run's checkpoints: beside, then renamed when complete. Every rank calls every method."""

    def __init__(self, run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int | None):
        self.run, self.model, self.optimizer, self.keep = run, model, optimizer, keep

    def save(self, step: int, facts: dict[str, Any]) -> Path:
        """Write `checkpoints/step-<step>`; `facts` go to its manifest. Raises CheckpointError on every rank if any rank
        could not write; the checkpoints before it stay."""
        beside = folder.incomplete(self.run, step)
        state = {"model": _model_state(self.model), "optimizer": _optimizer_state(self.model, self.optimizer)}
        self._on_first_rank(lambda: _make_empty(beside), beside)
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(beside, sync_files=True))
            reason = None
        except Exception as error:
            reason = _innermost(error)
        _raise_everywhere(reason, beside)
        self._on_first_rank(lambda: self._complete(beside, step, facts), beside)
        return beside.with_name(f"step-{step}")

    def load(self, path: Path) -> dict[str, Any]:
        """Fill model and optimizer from a complete checkpoint, whatever layout wrote it. Returns its manifest."""
        complete = folder.read(path)
        state = {"model": _model_state(self.model), "optimizer": _optimizer_state(self.model, self.optimizer)}
        _load(state, path)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=_OPTIONS)
        return complete.manifest

    def _complete(self, beside: Path, step: int, facts: dict[str, Any]) -> None:
        folder.write_manifest(beside, step, facts)
        _sync(beside / folder.MANIFEST)
        folder.publish(beside, step)
        folder.retain(self.run, self.keep)

    def _on_first_rank(self, work: Callable[[], None], path: Path) -> None:
        reason = None
        if dist.get_rank() == 0:
            try:
                work()
            except OSError as error:
                reason = str(error)
        _raise_everywhere(reason, path)


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill the parameters and persistent buffers of `model` from a complete checkpoint."""
    folder.read(path)
    _load({"model": _model_state(model)}, path)


def bytes_needed(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """About how large a checkpoint of this run is, all ranks together: parameters and their optimizer state."""
    moments = 2 if isinstance(optimizer, torch.optim.AdamW) else int(bool(optimizer.defaults.get("momentum")))
    return sum(p.numel() * p.element_size() * (1 + moments * p.requires_grad) for p in model.parameters())


def check_space(run: Path, needed: int) -> None:
    """Raises CheckpointError if the disk under `run` cannot hold one checkpoint of `needed` bytes."""
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint.dir: one checkpoint needs about {needed:,} bytes, but the disk of {run} has {free:,} bytes free; "
            "free some, or name another folder"
        )


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Each tensor once: a tied copy is left out, and follows the one that it is tied to."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=_OPTIONS)


def _load(state: dict[str, Any], path: Path) -> None:
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    except Exception as error:
        raise CheckpointError(f"{path} does not fit this run's model or optimizer: {_innermost(error)}") from error


def _make_empty(beside: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)


def _raise_everywhere(reason: str | None, path: Path) -> None:
    """If any rank has a reason, every rank raises with the first one."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    first = next(((rank, text) for rank, text in enumerate(reasons) if text), None)
    if first is not None:
        free = shutil.disk_usage(path if path.exists() else path.parent if path.parent.exists() else Path.cwd()).free
        error = CheckpointError(
            f"rank {first[0]} could not write the checkpoint {path} ({free:,} bytes free): {first[1]}; "
            "the checkpoints before it are complete"
        )
        error.shared = True
        raise error


def _innermost(error: BaseException) -> str:
    """torch wraps what went wrong on each rank; the cause is what a user can act on."""
    failures = getattr(error, "failures", None)
    if failures:
        wrapped = next(iter(failures.values()))
        error = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _sync(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
