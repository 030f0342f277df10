"""LoRA, full fine-tuning and QLoRA beside TRL's SFTTrainer with PEFT, in one run:

    python -m benchmarks.adapters [--steps 8] [--repeat 3] [--threads 2] [--methods lora,full,qlora] [--set hidden=512 ...]
    python -m benchmarks.adapters --memory [--contenders a,b]

Contenders alternate, each in a process of its own, as in benchmarks.sft, whose figures these are. All compute in float32; LoRA is
of rank 16 on every linear layer but the head. With `--memory` it prints the largest resident memory instead, of each method with
all activations kept, with selective and with full activation checkpointing; both sides compute logits in chunks always.
Needs `pip install "meshtune[bench,peft,bitsandbytes]"`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.adapters.contenders import CONTENDERS
from benchmarks.sft.measuring import Measured, measure, report, setting
from benchmarks.sft.work import Work

METHODS = ("lora", "full", "qlora")
KEPT = ("all", "selective", "full")
# Deep enough that what is trained, and not the head, decides. The shape of SmolLM2-135M at fewer layers.
SIZES = {"hidden": 576, "layers": 12, "inner": 1536, "heads": 9, "kv_heads": 3}


def main() -> None:
    """Measure, print."""
    asked = _arguments()
    work = Work(**{**SIZES, **dict(asked.set)})
    with tempfile.TemporaryDirectory(prefix="meshtune-bench-") as root:
        work.make(Path(root))
        if asked.memory:
            _memory(Path(root), asked, work)
        else:
            _speed(Path(root), asked, work)


def _speed(root: Path, asked: argparse.Namespace, work: Work) -> None:
    for method in asked.methods:
        results: dict[str, list[Measured]] = {name: [] for name in asked.contenders}
        for turn in range(asked.repeat):
            for name in asked.contenders:
                results[name].append(_measure(name, method, "all", root, asked.steps, asked.threads, work))
                print(f"{turn + 1}/{asked.repeat} {method} {name:17} {results[name][-1]}", file=sys.stderr, flush=True)
        print(f"\n{method}")
        report(results)


def _memory(root: Path, asked: argparse.Namespace, work: Work) -> None:
    print(f"{'peak GB':24}" + "".join(f"{kept:>12}" for kept in KEPT))
    for method in asked.methods:
        for name in asked.contenders:
            print(f"{method:7}{name:17}", end="", flush=True)
            for kept in KEPT:
                has_none = kept == "selective" and name != "meshtune"  # TRL's own needs a later transformers
                peak = None if has_none else _measure(name, method, kept, root, 4, asked.threads, work).peak_gb
                print(f"{'-':>12}" if peak is None else f"{peak:12.2f}", end="", flush=True)
            print(flush=True)


def _measure(name: str, method: str, kept: str, root: Path, steps: int, threads: int, work: Work) -> Measured:
    module = "benchmarks.adapters.contenders"
    command = [sys.executable, "-m", module, name, method, kept, str(root), str(steps), json.dumps(asdict(work))]
    return measure(f"{name} {method}", command, root, threads)


def _listed(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="a table of peak memory")
    parser.add_argument("--methods", type=_listed, default=list(METHODS))
    parser.add_argument("--contenders", type=_listed, default=list(CONTENDERS))
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="KEY=N", help="sizes of the work")
    return parser.parse_args()


if __name__ == "__main__":
    main()
