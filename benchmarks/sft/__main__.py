"""Supervised fine-tuning beside peers, in one run:

    python -m benchmarks.sft [--steps 8] [--repeat 3] [--ranks 1] [--threads 2] [--contenders a,b] [--set hidden=512 ...]

Contenders alternate, each in a process of its own (`--ranks 2`: in two, of `--threads` / 2 threads each). Printed for each: real
(not padding) tokens and supervised tokens per second over the steps after the first two, tokens for each second of CPU that these
took, the largest resident memory of its processes together, the seconds from its start to the end of the first step, preparation
of the rows included; medians, and as ratios to meshtune with their spread. `TRL` needs `pip install trl`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.sft.contenders import CONTENDERS, recipe
from benchmarks.sft.measuring import Measured, measure, report, setting
from benchmarks.sft.work import Work


def main() -> None:
    """Measure, print."""
    asked = _arguments()
    work, threads = Work(**dict(asked.set)), max(1, asked.threads // asked.ranks)
    results: dict[str, list[Measured]] = {name: [] for name in asked.contenders}
    with tempfile.TemporaryDirectory(prefix="meshtune-bench-") as root:
        work.make(Path(root))
        for turn in range(asked.repeat):
            for name in asked.contenders:
                command = _command(name, Path(root), asked, work)
                results[name].append(measure(name, command, Path(root), threads))
                print(f"{turn + 1}/{asked.repeat} {name:17} {results[name][-1]}", file=sys.stderr, flush=True)
    report(results)


def _command(name: str, root: Path, asked: argparse.Namespace, work: Work) -> list[str]:
    if name.startswith("meshtune") and asked.ranks > 1:
        made = recipe(root, asked.steps, work, packing=name == "meshtune")
        (root / "recipe.json").write_text(json.dumps(made), encoding="utf-8")  # JSON is YAML
        return [sys.executable, "-m", "meshtune", "train", str(root / "recipe.json"), "--nproc", str(asked.ranks)]
    module = ["-m", "benchmarks.sft.contenders", name, str(root), str(asked.steps), json.dumps(asdict(work))]
    if asked.ranks == 1:
        return [sys.executable, *module]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}", *module]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="KEY=N", help="sizes of the work")
    return parser.parse_args()


if __name__ == "__main__":
    main()
