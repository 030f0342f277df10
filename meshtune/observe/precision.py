"""The names of precisions, and which of fp32 and bf16 a device is good at, measured: some CPUs run bf16 hundreds of times
slower than fp32."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16"]
"""What `auto` chooses between: the others change what a run can stand, so they are for a user to ask for."""

# Of what is computed neither in float32 nor in 8 bits.
_COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}

# bf16 costs accuracy, timing is noisy, and a training step gains less than its matrix products do (measured: 2.1 times the
# products, 1.4 times the tokens per second): it has to be clearly quicker to be chosen.
_WORTHWHILE = 1.5
_FIRST_SIZE = 64
_LARGEST_SIZE = {"cpu": 1024}
_LARGEST_SIZE_ACCELERATOR = 8192


def compute_dtype(precision: str) -> torch.dtype:
    """What activations and gathered weights have in `training.precision`, `auto` excepted."""
    import torch

    return getattr(torch, _COMPUTE[precision])


def choose_precision(device: torch.device | str) -> tuple[Precision, dict[str, float]]:
    """`bf16` where the device multiplies matrices clearly quicker in it, else `fp32`; and FLOP/s of both,
    measured.

    Takes about half a second the first time, nothing afterwards in this process. Ranks measure for themselves
    and may differ: let one decide for all."""
    choice, flops = _measured(str(device))
    return choice, dict(flops)


@functools.cache
def _measured(device: str) -> tuple[Precision, dict[str, float]]:
    import torch

    flops = {
        "fp32": measure_matmul_flops(torch.float32, 0.2, device),
        "bf16": measure_matmul_flops(torch.bfloat16, 0.2, device),
    }
    choice: Precision = "bf16" if flops["bf16"] > _WORTHWHILE * flops["fp32"] else "fp32"
    return choice, flops


def measure_matmul_flops(dtype: torch.dtype, seconds_budget: float = 0.3, device: torch.device | str = "cpu") -> float:
    """The best FLOP/s seen in products of two square matrices of `dtype`; 0.0 where the device cannot
    multiply them.

    Sizes double from a tiny one for as long as the next is expected to fit into what is left of
    `seconds_budget` (seconds), so that a device that emulates the format does not hold up the start."""
    import torch

    device = torch.device(device)
    deadline = time.perf_counter() + seconds_budget
    largest = _LARGEST_SIZE.get(device.type, _LARGEST_SIZE_ACCELERATOR)
    size, best = _FIRST_SIZE, 0.0
    while size <= largest:
        try:
            seconds = _seconds_of_product(size, dtype, device, deadline)
        except RuntimeError:
            break
        best = max(best, 2.0 * size**3 / seconds)
        size *= 2
        # Eight times the work, a warm-up and at least one timed product.
        if time.perf_counter() + 2 * 8 * seconds > deadline:
            break
    return best


def _seconds_of_product(size: int, dtype: torch.dtype, device: torch.device, deadline: float) -> float:
    """The quickest of up to five products, after one that is not counted."""
    import torch

    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right, out = left.clone(), torch.empty_like(left)
    quickest = float("inf")
    for attempt in range(6):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if attempt > 0:
            quickest = min(quickest, time.perf_counter() - start)
        if attempt > 0 and time.perf_counter() + quickest > deadline:
            break
    return max(quickest, 1e-9)
