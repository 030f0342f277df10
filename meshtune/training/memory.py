"""Memory of the CPU that training frees in one step and takes again in the next."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.training.hooks import Hook

if TYPE_CHECKING:
    from meshtune.training.state import TrainState
    from meshtune.training.step import StepResult

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 1 << 30  # bytes of one tensor
_NEVER = -1
# What glibc itself comes to in a process that frees large blocks: the largest of its moving threshold, and twice that.
_USUAL_MMAP, _USUAL_TRIM = 32 << 20, 64 << 20
_FIRST_STEPS = 3
_SLACK = 1.25


class KeptMemory(Hook):
    """While training computes on the CPU, what is freed stays with the process, up to tensors of 1 GiB.

    By default glibc gives blocks over 32 MB back to the system when they are freed, and the system hands them out again page by
    page, zeroed: logits, their gradients and those of the embedding, anew in each step. What is kept can fall into pieces of
    which none fits, so it is given back when a step ends with a quarter more than the first steps did. Elsewhere than on
    Linux with glibc this does nothing.
    """

    def __init__(self, device_type: str) -> None:
        glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
        self._libc: Any = ctypes.CDLL(None) if glibc and device_type == "cpu" else None
        self._limit, self._learning = 0.0, _FIRST_STEPS

    def on_start(self, state: TrainState | None = None, total_steps: int = 0) -> None:
        """From now on, keep what is freed."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)

    def on_step(self, state: TrainState, result: StepResult, learning_rate: float, epoch: float) -> None:
        """Give back what has fallen into pieces."""
        self.bound()

    def bound(self) -> None:
        """Give what is free back to the system if it has become too much."""
        if self._libc is None:
            return
        resident = _resident_pages()
        if self._learning:
            self._limit, self._learning = max(self._limit, _SLACK * resident), self._learning - 1
        elif resident > self._limit:
            self._libc.malloc_trim(0)
            self._learning = 1  # where the next step needs as much again, it was no waste

    def on_end(self, state: TrainState | None = None) -> None:
        """Give back what is free, and go on as usual."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MMAP)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM)
            self._libc.malloc_trim(0)


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
