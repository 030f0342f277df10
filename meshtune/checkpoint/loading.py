"""Fill tensors from a complete checkpoint, sharded, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from meshtune.checkpoint import folder
from meshtune.checkpoint.state import Kept, State, model_state
from meshtune.checkpoint.storage import Reader
from meshtune.errors import CheckpointError

Stored = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


def load_weights(path: Path, model: nn.Module, kept: Kept | None = None) -> None:
    """Fill the parameters and persistent buffers of `model`, or those whose names are `kept`, from a complete checkpoint."""
    folder.read(path)
    state = model_state(model, kept)
    load_state(state, path, {name: entry for name, entry in stored_tensors(path).items() if name.startswith("model.")})


def stored_tensors(path: Path) -> Stored:
    """Name to size and dtype of everything in a checkpoint."""
    try:
        return Reader(path).read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def load_state(state: State, path: Path, stored: Stored) -> None:
    misfits = _of_all_ranks(_misfits(state, stored))
    if misfits:
        misfits = misfits if len(misfits) <= 20 else [*misfits[:20], f"and {len(misfits) - 20} more"]
        raise CheckpointError(f"{path} does not fit this run's model or optimizer:\n  " + "\n  ".join(misfits))
    try:
        dcp.load(state, storage_reader=Reader(path))
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_cause(error)}") from error


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


def first_cause(error: BaseException) -> str:
    """torch wraps what went wrong on each rank; the first cause is what a user can act on.

    A signal that ended the process inside torch's wrapper goes on ending it.
    """
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        if not isinstance(cause, Exception):
            raise cause
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return f"rank {rank}: {lines[0] if lines else type(cause).__name__}"
    return f"rank {dist.get_rank()}: {error}"
