"""Peak memory of full fine-tuning with each switch that lowers it, and what it costs in speed:

    python -m benchmarks.memory [--steps 5] [--threads 2] [--set hidden=768 ...]

One process each, as in benchmarks.sft; AdamW without clipping, one micro-batch a step, on the accelerator if there is one.
Weights and what is computed are float32, but in the rows with bf16 weights, which also compute in bfloat16 (slow on most CPUs).
Rows that move something to the memory of the CPU run with an accelerator only. The last loss is printed beside: of rows in
float32 it is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.sft.contenders import recipe
from benchmarks.sft.measuring import measure, setting
from benchmarks.sft.work import Work

SIZES = {
    "hidden": 768,
    "layers": 8,
    "inner": 2048,
    "heads": 12,
    "kv_heads": 4,
    "vocabulary": 8_000,
    "longest": 512,
    "rows": 200,
}
_FULL = {"activation_checkpointing": "full"}
_HELD = {"dtype": "bfloat16"}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "as it is": {},
    "activation_checkpointing: selective": {"training": {"activation_checkpointing": "selective"}},
    "activation_checkpointing: full": {"training": _FULL},
    "in_backward": {"optimizer": {"in_backward": True}},
    "full, in_backward": {"training": _FULL, "optimizer": {"in_backward": True}},
    "bf16 weights, stochastic": {"model": _HELD, "training": {"precision": "bf16"}},
    "bf16 weights, kahan": {"model": _HELD, "training": {"precision": "bf16"}, "optimizer": {"rounding": "kahan"}},
}
ON_AN_ACCELERATOR: dict[str, dict[str, dict[str, Any]]] = {
    "activation_offload": {"training": {"activation_offload": True}},
    "full, activation_offload": {"training": {"activation_offload": True, **_FULL}},
    "offload: optimizer": {"training": {"offload": "optimizer"}},
    "offload: parameters": {"training": {"offload": "parameters"}, "distributed": {"strategy": "fsdp2"}},
}


def train(row: str, folder: Path, steps: int, work: Work) -> None:
    """One row, in this process."""
    import meshtune

    made = recipe(folder, steps, work, packing=True)
    made["training"]["max_grad_norm"] = None
    for section, values in {**ROWS, **ON_AN_ACCELERATOR}[row].items():
        made[section] = {**made.get(section, {}), **values}
    meshtune.train(made)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="KEY=N", help="sizes of the work")
    asked = parser.parse_args()
    work = Work(**{**SIZES, **dict(asked.set)})
    with tempfile.TemporaryDirectory(prefix="meshtune-bench-") as root:
        work.make(Path(root))
        accelerator = torch.accelerator.is_available()
        for row in [*ROWS, *(ON_AN_ACCELERATOR if accelerator else ())]:
            command = [sys.executable, "-m", "benchmarks.memory", row, root, str(asked.steps), json.dumps(asdict(work))]
            found = measure(row, command, Path(root), asked.threads)
            last = json.loads((Path(root) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
            peak = last["peak_memory_bytes"] / 1e9 if accelerator else found.peak_gb
            print(
                f"{row:38}{peak:6.2f} GB {found.tokens_per_second:8.0f} tokens/s   loss {last['loss']:.6f}", flush=True
            )


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in {**ROWS, **ON_AN_ACCELERATOR}:
        train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Work(**json.loads(sys.argv[4])))
    else:
        main()
