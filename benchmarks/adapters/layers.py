"""An adapter's layer, forward and backward, beside PEFT's own: time of each as a share of PEFT's.

    python -m benchmarks.adapters.layers [--repeat 5] [--threads 1]

Layers take turns and the best of each counts, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A layer `of` some kind, called with `rows` of `width`, in PEFT's form of `settings`."""

    name: str
    of: Callable[[], nn.Module]
    rows: int
    width: int
    settings: dict[str, Any]
    calls: int


class Experts(nn.Module):
    """Eight stacked experts, of which a row goes to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.randn(8, 2 * width, width) / width**0.5)

    def forward(self, rows: Tensor) -> Tensor:
        each = len(rows) // self.num_experts
        parts = [nn.functional.linear(rows[e * each : (e + 1) * each], self.up[e]) for e in range(self.num_experts)]
        return torch.cat(parts)


def cases() -> Iterator[Case]:
    for rows, width, out, calls in ((512, 576, 576, 20), (1024, 576, 1536, 8), (1024, 2048, 2048, 3)):
        for dora in (False, True):
            name = f"{'DoRA' if dora else 'LoRA'} {rows} x {width} to {out}"
            layer = lambda width=width, out=out: nn.Sequential(nn.Linear(width, out, bias=False))  # noqa: E731
            yield Case(name, layer, rows, width, {"target_modules": ["0"], "use_dora": dora}, calls)
    stacked = {"target_modules": [], "target_parameters": ["up"]}
    yield Case("8 experts 512 x 576 to 1152", lambda: nn.ModuleDict({"mlp": Experts(576)}), 512, 576, stacked, 8)


def measured(case: Case, repeat: int) -> tuple[float, float, float]:
    """Milliseconds of a call: of the bare layer, with ours, with PEFT's."""
    from peft import LoraConfig, inject_adapter_in_model

    from meshtune.models.adapters.layers import use_own_layers

    bare = case.of().requires_grad_(False)
    theirs = inject_adapter_in_model(LoraConfig(r=16, **case.settings), copy.deepcopy(bare)).train()
    ours = copy.deepcopy(theirs)
    use_own_layers(ours)
    x = torch.randn(case.rows, case.width, requires_grad=True)
    best = [float("inf")] * 3
    for _ in range(repeat):
        for index, model in enumerate((bare, ours, theirs)):
            layer = model["mlp"] if isinstance(model, nn.ModuleDict) else model
            start = time.perf_counter()
            for _ in range(case.calls):
                output = layer(x)
                output.backward(torch.ones_like(output))
            best[index] = min(best[index], (time.perf_counter() - start) / case.calls * 1e3)
    return best[0], best[1], best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':32}{'bare ms':>10}{'meshtune':>10}{'PEFT':>10}{'ratio':>8}")
    for case in cases():
        bare, ours, theirs = measured(case, arguments.repeat)
        print(f"{case.name:32}{bare:10.2f}{ours:10.2f}{theirs:10.2f}{ours / theirs:8.2f}", flush=True)


if __name__ == "__main__":
    main()
