"""Tokens per second and peak memory of one model on several layouts, beside one process, in one run.

    python benchmarks/layouts.py [--layouts tp2,tp2+sp,cp2,pp2,fsdp2,ep2] [--steps 6] [--repeat 3] [--threads 2]

Each layout trains the same random 25M-parameter model on the same packed rows, in fp32, in processes of its own that have the
`--threads` among them; one after another, `--repeat` times in turn. Experts are timed beside one process with experts.
Printed: the median over the steps after the first, its ratio to one process, processor time for each token likewise, which other
work on the machine disturbs less, and the largest peak of resident memory of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LAYOUTS = "tp2,tp2+sp,cp2,pp2,fsdp2,ep2"
ROWS_A_STEP, LENGTH = 4, 512
VOCABULARY = 32_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": LENGTH,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def make_inputs(folder: Path, steps: int) -> None:
    """A model folder without experts and one with them, random weights in their configs' place, and rows of tokens."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

    from meshtune.data import store
    from meshtune.data.encoding import Encoded
    from meshtune.data.report import DataReport

    words = {f"word{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="word0")
    for name, config in (("dense", LlamaConfig(**SIZES)), ("experts", Qwen3MoeConfig(**SIZES, **EXPERTS))):
        config.architectures = ["LlamaForCausalLM" if name == "dense" else "Qwen3MoeForCausalLM"]
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = np.random.default_rng(0)
    with store.Writer(folder / "rows") as writer:
        count = steps * ROWS_A_STEP
        ids = (draw.integers(0, VOCABULARY, LENGTH).astype(np.int32) for _ in range(count))
        writer.append(Encoded(row, np.ones(LENGTH, bool)) for row in ids)
        report = DataReport(["drawn"], "text", LENGTH)
        report.documents, report.tokens = count, count * LENGTH
        report.measure(writer.lengths)
        writer.publish(report)


def recipe(folder: Path, layout: str, steps: int) -> tuple[dict[str, Any], int]:
    """The recipe of a layout's name (`one` and `one+experts`: one process), and its ranks."""
    from meshtune.layout.section import DistributedSection
    from meshtune.verify.layouts import parse

    section, ranks, readers = {}, 1, 1
    if not layout.startswith("one"):
        trial = parse(layout, DistributedSection())
        section, ranks, readers = trial.section.model_dump(exclude_defaults=True), trial.ranks, trial.readers
    model = "experts" if layout.startswith("ep") or layout == "one+experts" else "dense"
    return (
        {
            "model": {"name": str(folder / model), "weights": "random"},
            "data": {"train_path": "rows", "packing": True, "shuffle": False, "max_seq_length": LENGTH},
            "distributed": section,
            "training": {
                "learning_rate": 1e-4,
                "max_steps": steps,
                "precision": "fp32",
                "global_batch_size": ROWS_A_STEP,
                "per_device_batch_size": ROWS_A_STEP // 2 // readers,
            },
            "checkpoint": {"dir": str(folder / f"run-{layout}"), "export": "none", "resume": "never"},
            "logging": {"progress": "none"},
        },
        ranks,
    )


def contend(folder: Path, layout: str, steps: int) -> None:
    """Train on this rank, and print what was measured."""
    from meshtune.config import from_mapping
    from meshtune.data import store
    from meshtune.layout.world import connect, disconnect
    from meshtune.observe import peak_memory_bytes
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import Setup

    made = from_mapping(Recipe, recipe(folder, layout, steps)[0])
    began: list[float] = []
    with ExitStack() as held:
        setup = Setup(made, connect("cpu"), held, rows=lambda _: (store.load(folder / "rows"), {}))
        result = setup.train(None, lambda: began.append(_processor_seconds()))
        spent = _processor_seconds() - began[0]
        lines = (result.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rates = [row["tokens_per_second"] for row in map(json.loads, lines) if "loss" in row]
        disconnect()
    print(json.dumps({"rates": rates, "processor_s": spent, "peak": peak_memory_bytes("cpu")}))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def start(folder: Path, layout: str, steps: int, threads: int) -> list[dict[str, Any]]:
    """What each rank of a layout measured, in processes of their own."""
    made, ranks = recipe(folder, layout, steps)
    shutil.rmtree(made["checkpoint"]["dir"], ignore_errors=True)
    port = str(20_000 + os.getpid() % 20_000)
    command = [sys.executable, __file__, "--contender", layout, "--folder", str(folder), "--steps", str(steps)]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    world |= {"OMP_NUM_THREADS": str(max(1, threads // ranks)), "MESHTUNE_CACHE": str(folder / "cache")}
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate() for process in started]
    for process, (_, problems) in zip(started, answers, strict=True):
        if process.returncode:
            raise SystemExit(f"{layout}: {problems[-3000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def report(results: dict[str, list[list[dict[str, Any]]]], steps: int) -> None:
    tokens = steps * ROWS_A_STEP * LENGTH
    rates = {name: statistics.median(r for run in runs for r in run[0]["rates"][1:]) for name, runs in results.items()}
    spent = {
        name: statistics.median(1e3 * sum(rank["processor_s"] for rank in run) / tokens for run in runs)
        for name, runs in results.items()
    }
    print(f"{'':12} {'tokens/s':>9} {'ratio':>6} {'CPU ms/token':>13} {'ratio':>6} {'peak GB per rank':>17}")
    for name, runs in results.items():
        one = "one+experts" if name.startswith("ep") or name == "one+experts" else "one"
        peak = statistics.median(max(rank["peak"] for rank in run) for run in runs) / 1e9
        print(
            f"{name:12} {rates[name]:9.0f} {rates[name] / rates[one]:6.2f} {spent[name]:13.3f} "
            f"{spent[name] / spent[one]:6.2f} {peak:17.2f}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layouts", default=LAYOUTS)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--contender", help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.contender:
        return contend(asked.folder, asked.contender, asked.steps)
    names = asked.layouts.split(",")
    names = ["one", *(["one+experts"] if any(name.startswith("ep") for name in names) else []), *names]
    results: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), asked.steps)
        for turn in range(asked.repeat):
            for name in names:
                done = start(Path(folder), name, asked.steps, asked.threads)
                results[name].append(done)
                load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
                rate, spent = statistics.median(done[0]["rates"][1:]), sum(rank["processor_s"] for rank in done)
                print(
                    f"round {turn + 1} {name:12} {rate:7.0f} tokens/s, {spent:.1f} s of CPU, load {load:.0f}",
                    flush=True,
                )
    print(f"on {os.cpu_count()} cores:")
    report(results, asked.steps)
    return None


if __name__ == "__main__":
    main()
