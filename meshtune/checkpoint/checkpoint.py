"""Save and load model and optimizer with torch.distributed.checkpoint, sharded, on any number of ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from meshtune.checkpoint import folder
from meshtune.checkpoint.state import OptimizerState, State, model_state, moments
from meshtune.checkpoint.storage import Reader, Writer
from meshtune.errors import CheckpointError
from meshtune.layout.pieces import named_pieces, whole_shape

Stored = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


class Checkpointer:
    """Writes a run's checkpoints: beside, then renamed when complete. Every rank calls every method.

    Make it when the weights are in place and before the first step.
    """

    def __init__(self, run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int | None):
        self._run, self._model, self._keep = run, model, keep
        self._optimizer = OptimizerState(model, optimizer)
        self._nbytes = bytes_needed(model, optimizer)

    def save(self, step: int, facts: dict[str, Any]) -> Path:
        """Write `checkpoints/step-<step>`; `facts` go to its manifest.

        Raises CheckpointError on every rank if any rank could not write. The checkpoints before it stay as they are
        until it is complete; then those beyond `keep` go.
        """
        beside = self._on_first_rank(step, lambda: folder.begin(self._run, step))
        reason = None
        try:
            dcp.save(self._state(), storage_writer=Writer(beside))
        except (CheckpointException, OSError) as error:
            reason = _reason(error)
        self._raise_together(step, reason, beside)
        path = self._on_first_rank(step, lambda: folder.publish(beside, step, facts), beside)
        self._on_first_rank(step, lambda: folder.retain(self._run, self._keep))
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """Fill model and optimizer from a complete checkpoint, whatever layout wrote it. Returns its manifest.

        Raises CheckpointError naming every tensor that only one of them has.
        """
        complete = folder.read(path)
        stored = _stored(path)
        self._optimizer.make(stored)
        _load(self._state(), path, stored)
        return complete.manifest

    def _state(self) -> State:
        return {**model_state(self._model), **self._optimizer.tensors()}

    def _on_first_rank(self, step: int, work: Callable[[], Any], beside: Path | None = None) -> Any:
        """The result of `work` on rank 0, for every rank; every rank raises if it could not be done."""
        outcome: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome[0] = work()
            except OSError as error:
                outcome[1] = f"rank 0: {error}"
        dist.broadcast_object_list(outcome, src=0)
        self._raise_together(step, outcome[1], beside)
        return outcome[0]

    def _raise_together(self, step: int, reason: str | None, beside: Path | None) -> None:
        """If any rank has a reason, every rank raises with the first one; what the attempt has written is removed."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        first = next((text for text in reasons if text), None)
        if first is None:
            return
        message = [""]
        if dist.get_rank() == 0:
            if beside is not None:
                folder.discard(beside)
            path, free = folder.path_of(self._run, step), shutil.disk_usage(self._run).free
            message[0] = (
                f"the checkpoint {path} could not be written: {first}. It needs about {self._nbytes:,} bytes, and the disk "
                f"has {free:,} bytes free. The checkpoints before it are complete; the same command continues from them"
            )
        dist.broadcast_object_list(message, src=0)
        error = CheckpointError(message[0])
        error.shared = True
        raise error


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill the parameters and persistent buffers of `model` from a complete checkpoint."""
    folder.read(path)
    state = model_state(model)
    _load(state, path, {name: entry for name, entry in _stored(path).items() if name.startswith("model.")})


def bytes_needed(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """About how large a checkpoint of this run is, all ranks together: parameters and their moments."""
    each, pieces = moments(optimizer), named_pieces(model)
    return sum(
        math.prod(whole_shape(p.shape, pieces.get(name))) * p.element_size() * (1 + each * p.requires_grad)
        for name, p in model.named_parameters()
    )


def check_space(run: Path, needed: int) -> None:
    """Raises CheckpointError if the disk under `run` cannot hold one checkpoint of `needed` bytes."""
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint.dir: one checkpoint needs about {needed:,} bytes, but the disk of {run} has {free:,} bytes "
            "free; free some, or name another folder"
        )


def _stored(path: Path) -> Stored:
    """Name to size and dtype of everything in a checkpoint."""
    try:
        return Reader(path).read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _load(state: State, path: Path, stored: Stored) -> None:
    misfits = _of_all_ranks(_misfits(state, stored))
    if misfits:
        misfits = misfits if len(misfits) <= 20 else [*misfits[:20], f"and {len(misfits) - 20} more"]
        raise CheckpointError(f"{path} does not fit this run's model or optimizer:\n  " + "\n  ".join(misfits))
    try:
        dcp.load(state, storage_reader=Reader(path))
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


def _misfits(state: State, stored: Stored) -> list[str]:
    """What this rank has and the checkpoint lacks, or has otherwise; and what the checkpoint has and no rank."""
    found = [f"{name} is not in the checkpoint" for name in state if name not in stored]
    everywhere = set(_of_all_ranks(list(state)))
    found += [f"{name} is in the checkpoint only" for name in stored if name not in everywhere]
    for name, tensor in state.items():
        entry = stored.get(name)
        if isinstance(entry, TensorStorageMetadata):
            there, here = (entry.properties.dtype, tuple(entry.size)), (tensor.dtype, tuple(tensor.shape))
            if there != here:
                found.append(f"{name} is {there[0]} {there[1]} in the checkpoint, {here[0]} {here[1]} in this run")
    return found


def _of_all_ranks(texts: list[str]) -> list[str]:
    """Each text of any rank, once."""
    if not dist.is_initialized():
        return texts
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, texts)
    return list(dict.fromkeys(text for own in gathered for text in own))


def _reason(error: BaseException) -> str:
    """torch wraps what went wrong on each rank; the first cause is what a user can act on.

    A signal that ended the process inside torch's wrapper goes on ending it.
    """
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        if not isinstance(cause, Exception):
            raise cause
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return f"rank {rank}: {lines[0] if lines else type(cause).__name__}"
    return f"rank {dist.get_rank()}: {error}"
