"""How far an optimizer step is from what the machine could do at best, and from the memory that the formula predicts.

    python -m benchmarks.sft.floors [--steps 8] [--threads 2] [--strategy fsdp2] [--set layers=8 ...]

Trains meshtune on the work of `benchmarks.sft` in this process, and prints the step's time (the median over the steps after the
first two) beside two floors: its floating-point operations over the rate of a matrix product of the model's shapes, and the bytes
that it must move over the bandwidth of a copy. And the peak of resident memory beside the formula of docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.sft.work import Work


@dataclass(frozen=True)
class Step:
    """One optimizer step: what went in, and how long it took."""

    documents: Sequence[int]
    supervised: int
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.documents)


def flops(work: Work, step: Step) -> float:
    """Forward and backward. A weight takes 2 operations a token forward and 4 backward; causal attention of a document of T
    tokens 2 T² heads·head_dim forward, and 2.5 times that backward, where scores are computed again."""
    attention = sum(2 * length**2 * work.hidden for length in step.documents) * work.layers * 3.5
    return (
        6 * layer_parameters(work) * work.layers * step.tokens + 6 * head_parameters(work) * step.supervised + attention
    )


def bytes_moved(work: Work, step: Step) -> float:
    """Each weight is read forward and backward, its gradient written and read, its moments read and written, it too; each
    activation is written and read; logits are written, read and turned into gradients, which are read twice."""
    parameters = layer_parameters(work) * work.layers + head_parameters(work)
    activations = activation_floats(work) * work.layers * step.tokens
    logits = work.vocabulary * step.supervised
    return 4 * (10 * parameters + 2 * activations + 5 * logits)


def predicted_peak(work: Work, tokens: int, base: float) -> float:
    """The formula of docs/performance.md, in bytes, for one rank and float32 without activation checkpointing; `base` is what the
    process holds before the model."""
    parameters = layer_parameters(work) * work.layers + head_parameters(work)
    rows = max(256, 64 * 2**20 // (4 * work.vocabulary))
    head = 4 * (2 * min(rows, tokens) * work.vocabulary + 2 * head_parameters(work))
    return base + 16 * parameters + 4 * activation_floats(work) * work.layers * tokens + head


def layer_parameters(work: Work) -> int:
    keys = work.hidden // work.heads * work.kv_heads
    return 2 * work.hidden * (work.hidden + keys) + 3 * work.hidden * work.inner + 2 * work.hidden


def head_parameters(work: Work) -> int:
    return work.vocabulary * work.hidden


def activation_floats(work: Work) -> int:
    """What the backward of a Llama block keeps of a token: both norms' inputs, scaled inputs and outputs, queries, keys, values
    and the output of attention, and of the gated feed-forward four tensors of its inner width."""
    return 9 * work.hidden + 2 * (work.hidden // work.heads * work.kv_heads) + 4 * work.inner


def main() -> None:
    """Train, measure, print."""
    asked = _arguments()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    import torch

    torch.set_num_threads(asked.threads)
    work = Work(**dict(asked.set))
    with tempfile.TemporaryDirectory(prefix="meshtune-floors-") as root:
        os.environ["MESHTUNE_CACHE"] = str(Path(root) / "cache")
        work.make(Path(root))
        base, steps = train(Path(root), work, asked.steps, asked.strategy)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate, bandwidth = matmul_rate(work), copy_bandwidth()
    kept = steps[2:]
    took = median(step.seconds / step.tokens for step in kept)
    arithmetic = median(flops(work, step) / rate / step.tokens for step in kept)
    traffic = median(bytes_moved(work, step) / bandwidth / step.tokens for step in kept)
    largest = max(step.tokens for step in steps)
    print(f"{asked.threads} threads: products at {rate / 1e9:.0f} GFLOP/s, copies at {bandwidth / 1e9:.1f} GB/s")
    print(f"a step takes {took * 1e3:.3f} ms a token ({1 / took:,.0f} tokens/s)")
    print(f"  arithmetic alone {arithmetic * 1e3:.3f} ms: the step takes {took / arithmetic:.2f} times that")
    print(f"  memory traffic alone {traffic * 1e3:.3f} ms: the step takes {took / traffic:.2f} times that")
    predicted = predicted_peak(work, largest, base)
    print(f"peak memory {peak / 1e9:.2f} GB, by the formula {predicted / 1e9:.2f} GB ({predicted / peak:.2f})")


def train(root: Path, work: Work, count: int, strategy: str) -> tuple[float, list[Step]]:
    """Resident bytes before the model is built, and the steps."""
    from benchmarks.sft.contenders import recipe
    from meshtune.config import from_mapping
    from meshtune.layout.world import connect, disconnect
    from meshtune.recipes import assembly
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import Setup
    from meshtune.training.memory import KeptMemory
    from meshtune.training.signals import SignalStop

    made: dict[str, Any] = recipe(root, count, work, True)
    made["distributed"] = {"strategy": strategy}
    found = []
    with ExitStack() as held:
        setup = Setup(from_mapping(Recipe, made), connect("cpu"), held)
        base = _resident()
        setup.model, parallel = assembly.build_model(setup, None)
        parts, _, _ = assembly.assemble(setup, parallel, SignalStop())
        kept = KeptMemory("cpu")
        kept.on_start()
        for number in range(count):
            batches = parts.loader.next()
            begun = time.perf_counter()
            result = parts.step(batches, number, 1e-4)
            documents = [n for batch in batches for n in batch.document_lengths.tolist()]
            kept.bound()
            found.append(Step(documents, result.supervised_tokens, time.perf_counter() - begun))
        disconnect()
    shutil.rmtree(root / "run", ignore_errors=True)
    return base, found


def matmul_rate(work: Work) -> float:
    """Operations a second of the feed-forward's product, the largest of a block, on a thousand tokens."""
    import torch

    left, right = torch.randn(1024, work.hidden), torch.randn(work.hidden, work.inner)
    return 2 * 1024 * work.hidden * work.inner / _best(lambda: left @ right)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy too large for any cache."""
    import torch

    source = torch.ones(64 * 2**20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


def _best(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _arguments() -> argparse.Namespace:
    from benchmarks.sft.measuring import setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="KEY=N", help="sizes of the work")
    return parser.parse_args()


if __name__ == "__main__":
    main()
