"""Whether a disk has room for a checkpoint."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn

from meshtune.checkpoint.state import Kept
from meshtune.errors import CheckpointError
from meshtune.layout.pieces import named_pieces, whole_shape
from meshtune.optim.kept import state_bytes


def bytes_needed(model: nn.Module, optimizer: torch.optim.Optimizer, kept: Kept | None = None) -> int:
    """About how large a checkpoint of this run is, all ranks together: parameters, or those `kept`, and their moments."""
    pieces, needed = named_pieces(model), 0
    for name, parameter in model.named_parameters():
        if kept is None or kept(name):
            shape, each = whole_shape(parameter.shape, pieces.get(name)), parameter.element_size()
            needed += math.prod(shape) * each
            needed += state_bytes(optimizer, parameter, shape, each) if parameter.requires_grad else 0
    return needed


def check_space(run: Path, needed: int) -> None:
    """Raises CheckpointError if the disk under `run` cannot hold one checkpoint of `needed` bytes."""
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint.dir: one checkpoint needs about {needed:,} bytes, but the disk of {run} has {free:,} bytes "
            "free; free some, or name another folder"
        )


def refuse_full(run: Path, needed: int) -> None:
    """Raises the OSError of a full disk before the first of `needed` bytes is written, where there is no room for them."""
    if shutil.disk_usage(run).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run))
