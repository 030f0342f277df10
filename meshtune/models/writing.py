"""A folder that one rank writes while the others wait, which appears only when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


class OnWriter:
    """Work of rank 0. Its failure ends its own work only, for other ranks are waiting for it: then all raise together."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.writes = not dist.is_initialized() or dist.get_rank() == 0
        self.problem: Exception | None = None

    def __enter__(self) -> OnWriter:
        return self

    def do(self, work: Callable[[], Any]) -> Any:
        if not self.writes or self.problem is not None:
            return None
        try:
            return work()
        except Exception as error:
            self.problem = error
            return None

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            return
        told = [None if self.problem is None else f"{type(self.problem).__name__}: {self.problem}"]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise OSError(f"the model could not be written to {self.folder}: {told[0]}") from self.problem


def empty_beside(folder: Path) -> Path:
    """An empty folder in which `folder` is made."""
    beside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def replace(beside: Path, folder: Path) -> None:
    """Put what was made in `beside` in the place of `folder` and of what stood there."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(folder)
