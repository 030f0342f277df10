"""Whether a disk has room for a checkpoint."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn

from meshtune.checkpoint.state import moments
from meshtune.errors import CheckpointError
from meshtune.layout.pieces import named_pieces, whole_shape


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


def refuse_full(run: Path, needed: int) -> None:
    """Raises the OSError of a full disk before the first of `needed` bytes is written, where there is no room for them."""
    if shutil.disk_usage(run).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run))
