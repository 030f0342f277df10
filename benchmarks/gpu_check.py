"""One GPU, under five minutes: fine-tuning of a 1B and an 8B shape (random weights) on packed rows, in bf16.

    python benchmarks/gpu_check.py [--shapes 1b,8b] [--steps 8] [--device cuda] [--attention auto] [--minutes 5]

Each shape is trained without and with `compile` from the same weights, each time in a process of its own, so that nothing of
the one before is left on the card. Printed for each: the loss of the first and the last step, tokens per second, MFU (medians
over the steps after the first two), peak memory, and the attention that ran: flash_attention_2 where it is installed, else SDPA
by document, whose kernel torch chooses. The 1B shape is trained with flex_attention, in fp32 and in fp16, too, and in fp8 where
the device multiplies in it and torchao is installed.

AdamW with fp32 weights takes 16 bytes a parameter: 128 GB for the 8B shape. So that shape holds its weights in bfloat16 (8 bytes
a parameter with gradients and moments, 64 GB) and checkpoints its activations: about 70 GB in all by the formula of
docs/performance.md, for a card of 80 GB. Of fp32 it makes one step by SGD without momentum (8 bytes a parameter), for the loss
alone. What does not fit, or fails, is said, and the rest goes on. No checkpoint is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
    "tiny": TINY,
    "tiny-large": TINY,
}
LARGE = ("8b", "tiny-large")
"""Trained with bfloat16 weights and activation checkpointing."""
LENGTH = {"tiny": 128, "tiny-large": 128, "1b": 4096, "8b": 4096}
PACKS_A_STEP = 4
SKIPPED_STEPS = 2


@dataclass
class Row:
    """One run: losses of all steps, and medians; None of what a run of one step cannot say."""

    machine: str
    loss: list[float]
    tokens_per_second: float | None
    mfu: float | None
    peak_gb: float
    attention: str


def main() -> None:
    """Train each, print a table as it grows. Exit code 1 if any failed."""
    asked = _arguments()
    if asked.run is not None:
        _train_here(json.loads(asked.run))
        return
    deadline, failed = time.monotonic() + 60 * asked.minutes, 0
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="meshtune-gpu-") as root:
        for shape in asked.shapes.split(","):
            folder = Path(root) / shape
            _make_inputs(folder, shape, asked.steps)
            for name, changes in _variants(shape, asked):
                begun = time.monotonic()
                row = _in_a_process(folder, _recipe(folder, name, changes, asked), asked.device, deadline)
                if isinstance(row, Row):
                    if not rows:
                        print(_head(row.machine), flush=True)
                    rows[name] = row
                    print(_line(name, row, time.monotonic() - begun), flush=True)
                else:
                    failed += row.startswith("failed")
                    print(f"{name:26} {row}", flush=True)
            _beside_fp32(shape, rows)
    sys.exit(1 if failed else 0)


def _head(machine: str) -> str:
    names = f"{'':26} {'first loss':>10} {'last loss':>10} {'tokens/s':>9} {'MFU':>6} {'peak GB':>8} {'s in all':>9}"
    return f"{machine}\n{names}  attention"


def _line(name: str, row: Row, seconds: float) -> str:
    speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    share = "" if row.mfu is None else f"{row.mfu:.1%}"
    figures = f"{speed:>9} {share:>6} {row.peak_gb:8.1f} {seconds:9.1f}  {row.attention}"
    return f"{name:26} {row.loss[0]:10.4f} {row.loss[-1]:10.4f} {figures}"


def _beside_fp32(shape: str, rows: dict[str, Row]) -> None:
    reference = next((row for name, row in rows.items() if name.startswith(f"{shape} fp32")), None)
    found = rows.get(f"{shape} bf16")
    if reference is not None and found is not None:
        steps = min(len(found.loss), len(reference.loss))
        largest = max(abs(a - b) for a, b in zip(found.loss[:steps], reference.loss[:steps], strict=True))
        print(
            f"{shape}: the losses of {steps} step{'s' if steps > 1 else ''} in bf16 are within {largest:.4f} of fp32's"
        )


def _variants(shape: str, asked: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    large = shape in LARGE
    saving = {"activation_checkpointing": "full"} if large else {}
    bf16 = {
        "model": {"dtype": "bfloat16"} if large else {},
        "training": {"precision": "bf16", **saving},
    }
    compiled = {**bf16, "training": {**bf16["training"], "compile": True}}
    fp32: dict[str, Any] = {"training": {"precision": "fp32", **saving}}
    if large:
        fp32["optimizer"], fp32["training"]["max_steps"] = {"name": "sgd"}, 1
    flex = {**bf16, "model": {"attention": "flex_attention"}}
    return [
        (f"{shape} bf16", bf16),
        (f"{shape} bf16, compile", compiled),
        *([(f"{shape} bf16, flex", flex)] if not large and asked.device == "cuda" else []),
        *([(f"{shape} fp16", {"training": {"precision": "fp16"}})] if not large and asked.device == "cuda" else []),
        *([(f"{shape} fp8, compile", _FP8)] if not large and _multiplies_in_fp8(asked.device) else []),
        (f"{shape} fp32{', one step' if large else ''}", fp32),
    ]


_FP8 = {"training": {"precision": "fp8", "fp8": {"emulate": False}, "compile": True}}


def _multiplies_in_fp8(device: str) -> bool:
    """Whether fp8 can be tried here: on the hardware, with torchao installed."""
    import torch

    from meshtune.parallel.float8 import has_products

    return has_products(torch.device(device), "tensorwise") and importlib.util.find_spec("torchao") is not None


def _in_a_process(folder: Path, recipe: dict[str, Any], device: str, deadline: float) -> Row | str:
    """The row of a run, or why there is none."""
    result = folder / "row.json"
    result.unlink(missing_ok=True)
    task = json.dumps({"folder": str(folder), "recipe": recipe, "device": device})
    # Shapes of packs differ a little from step to step; fixed segments would break into pieces where little is left.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    left = deadline - time.monotonic()
    if left <= 0:
        return "not run: the time is over (--minutes)"
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--run", task]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return "stopped: the time is over (--minutes)"
    if done.returncode == 0:
        return Row(**json.loads(result.read_text(encoding="utf-8")))
    said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return "failed: " + next((line for line in said if "out of memory" in line), said[-1])


def _train_here(task: dict[str, Any]) -> None:
    """One run; its row goes to a file."""
    from meshtune.config import from_mapping
    from meshtune.layout.world import connect
    from meshtune.recipes import assembly
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import Setup
    from meshtune.training.loop import fit
    from meshtune.training.signals import SignalStop

    recipe = from_mapping(Recipe, task["recipe"])
    # Of the 8B shape a checkpoint would have 48 GB, and nobody would read it: neither room for it nor it is asked for.
    with ExitStack() as held, mock.patch.object(assembly, "check_space", lambda *_: None):
        setup = Setup(recipe, connect(task["device"]), held)
        setup.model, parallel = assembly.build_model(setup, _random_weights(recipe, task["device"]))
        parts, state, reporter = assembly.assemble(setup, parallel, SignalStop())
        parts.saver = None
        fit(parts, state, [reporter])
    row = _row(setup.run, task["device"], setup.attention.description)
    (Path(task["folder"]) / "row.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


def _row(run: Path, device: str, attention: str) -> Row:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = rows[SKIPPED_STEPS:]
    shares = [row["mfu"] for row in kept if row["mfu"] is not None]
    return Row(
        _machine(device),
        [row["loss"] for row in rows],
        median(row["tokens_per_second"] for row in kept) if kept else None,
        median(shares) if shares else None,
        max(row["peak_memory_bytes"] for row in rows) / 1e9,
        attention,
    )


def _random_weights(recipe: Any, device: str) -> dict[str, Any]:
    """The same in each process, drawn on the device, which takes seconds where a CPU takes minutes, and kept in host memory until
    the model has room for them. Norms are one."""
    import torch

    from meshtune.models import hf
    from meshtune.models.source import resolve

    model = hf.build(resolve(recipe.model), "eager")
    draw = torch.Generator(device).manual_seed(0)
    weights = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        weights[key] = (drawn.normal_(0, 0.02, generator=draw) if parameter.ndim > 1 else drawn.fill_(1)).cpu()
    for tied, origin in model.all_tied_weights_keys.items():
        weights[tied] = weights[origin]
    return weights


def _recipe(folder: Path, name: str, changes: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(folder), "weights": "random", "attention": asked.attention},
        "data": {"train_path": str(folder / "rows.jsonl"), "packing": True, "max_seq_length": LENGTH[folder.name]},
        "training": {
            "learning_rate": 1e-4,
            "max_steps": asked.steps,
            "global_batch_size": PACKS_A_STEP,
            "per_device_batch_size": 1,
        },
        "checkpoint": {
            "dir": str(folder / name.replace(", ", "-").replace(" ", "-")),
            "export": "none",
            "resume": "never",
        },
        "logging": {"progress": "none"},
    }
    return {key: {**sections.get(key, {}), **changes.get(key, {})} for key in sections | changes}


def _make_inputs(folder: Path, shape: str, steps: int) -> None:
    """A Llama config with a word-level tokenizer, and rows of tokens of unequal lengths, half of each supervised."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    longest, vocabulary = LENGTH[shape], 512 if shape.startswith("tiny") else 128_256
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 4,
        vocab_size=vocabulary,
        tie_word_embeddings=shape not in LARGE,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = {f"w{i}": i for i in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1").save_pretrained(folder)
    draw = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as out:
        left = (steps + 1) * PACKS_A_STEP * longest
        while left > 0:
            # Few distinct words, so that there is something to learn in a few steps.
            ids = (draw.zipf(1.3, int(draw.integers(longest // 16, longest))) % vocabulary).tolist()
            labels = [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]
            out.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
            left -= len(ids)


def _machine(device: str) -> str:
    import torch
    import transformers

    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{card}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", default="auto", help="as model.attention of a recipe")
    parser.add_argument("--minutes", type=float, default=5.0, help="what is not done by then is left out")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.device == "cuda" and asked.run is None:
        import torch

        if not torch.cuda.is_available():
            sys.exit("no GPU is here; --device cpu --shapes tiny tries the script itself")
    return asked


if __name__ == "__main__":
    main()
