"""The ranks of this run: joined from torchrun's environment, or one process on its own, on the same path."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from meshtune.errors import LayoutError, MeshtuneError

T = TypeVar("T")

_LOOK_AGAIN_S = 1.0

# gloo's threads let go of their last work through the interpreter, and one that finds it closing aborts the process (3 of 33 runs
# of two ranks that left at once, none of 32 that waited so long).
_PARTING_S = 0.05


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def each_node_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of every node, then on the others, which find its result cached.

        If it raises on any rank, every rank raises: nobody is left waiting. The first ranks may work for longer than a
        collective would wait for them.
        """
        result, error = _attempt(work) if self.local_rank == 0 else (None, None)
        self._meet()
        self._raise_together(error)
        if self.local_rank != 0:
            result, error = _attempt(work)
        self._meet()
        self._raise_together(error)
        return result  # type: ignore[return-value]

    def all_together(self, work: Callable[[], T]) -> T:
        """Run `work`, which communicates with nobody, on every rank; if it raises on any, every rank raises."""
        result, error = _attempt(work)
        self._raise_together(error)
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and give every rank its (picklable) result, or its error."""
        result, error = _attempt(work) if self.is_first else (None, None)
        outcome = [(result, _portable(error))]
        dist.broadcast_object_list(outcome, src=0)
        if error is not None:
            raise error
        result, error = outcome[0]
        if error is not None:
            raise _as_shared(error)
        return result  # type: ignore[return-value]

    def _meet(self) -> None:
        """Return when every rank has come here, however late. Who started the ranks ends them all when one is lost."""
        store = dist.distributed_c10d._get_default_store()
        meeting = f"meshtune/meeting/{store.add(f'meshtune/meetings/{self.rank}', 1)}"
        if store.add(meeting, 1) == self.size:
            store.set(f"{meeting}/complete", "1")
        pause = 0.01
        while not store.check([f"{meeting}/complete"]):  # the store's own waiting complains whenever its time is up
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_AGAIN_S)

    def _raise_together(self, error: Exception | None) -> None:
        errors: list[Exception | None] = [None] * self.size
        dist.all_gather_object(errors, _portable(error))
        if error is not None:
            raise error
        for other in errors:
            if other is not None:
                raise _as_shared(other)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """The error as other ranks raise it. Not every exception can be pickled; its type's name and text always can."""
    if error is None:
        return None
    if isinstance(error, MeshtuneError):
        error.shared = True
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _as_shared(error: Exception) -> Exception:
    """Instance attributes do not survive every error's pickling."""
    if isinstance(error, MeshtuneError):
        error.shared = True
    return error


def connect(device: str | None = None) -> World:
    """Join the ranks that `torchrun` describes in the environment, or be a world of one. Idempotent."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = _device(device, local_rank)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, chosen)


def own_device_type() -> str:
    """What a run on this machine computes on, where nothing else is asked for."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def background_group() -> dist.ProcessGroup:
    """All ranks, over gloo: for a thread beside the training, whose messages must not meet those of the step."""
    return dist.new_group(backend="gloo")


def disconnect() -> None:
    """Leave the ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # the threads of a group end with the last mesh that holds it
        time.sleep(_PARTING_S)


def _device(device: str | None, local_rank: int) -> torch.device:
    chosen = torch.device(device or own_device_type())
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise LayoutError(f"device {device} was asked for, but torch sees no GPU on this machine")
        index = chosen.index if chosen.index is not None else local_rank
        if index >= torch.cuda.device_count():
            raise LayoutError(
                f"rank with local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()} here"
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen
