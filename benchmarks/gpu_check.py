"""One GPU, under five minutes: fine-tuning of a 1B and an 8B shape (random weights) on packed rows, in bf16.

    python benchmarks/gpu_check.py [--shapes 1b,8b] [--steps 8] [--device cuda] [--attention auto]

Each shape is trained without and with `compile` from the same weights; the 1B shape in fp32, too. Printed for each: the loss of
the first and the last step, tokens per second, MFU (medians over the steps after the first two) and peak memory. The 8B shape
holds its weights in bfloat16 and checkpoints its activations, so that it fits on a card of 80 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
}
LENGTH = {"tiny": 128, "1b": 4096, "8b": 4096}
PACKS_A_STEP = 4
SKIPPED_STEPS = 2


@dataclass
class Row:
    """One run: losses of all steps, and medians."""

    name: str
    loss: list[float]
    tokens_per_second: float
    mfu: float | None
    peak_gb: float
    seconds: float


def main() -> None:
    """Train each, print a table as it grows."""
    asked = _arguments()
    print(_machine(asked.device), flush=True)
    print(
        f"{'':22} {'first loss':>10} {'last loss':>10} {'tokens/s':>9} {'MFU':>6} {'peak GB':>8} {'s in all':>9}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="meshtune-gpu-") as root:
        for shape in asked.shapes.split(","):
            folder = Path(root) / shape
            _make_inputs(folder, shape, asked.steps)
            weights = None
            for name, changes in _variants(shape):
                row, weights = _train(folder, name, changes, weights, asked)
                rate = "" if row.mfu is None else f"{row.mfu:.1%}"
                figures = f"{row.tokens_per_second:9,.0f} {rate:>6} {row.peak_gb:8.1f} {row.seconds:9.1f}"
                print(f"{row.name:22} {row.loss[0]:10.4f} {row.loss[-1]:10.4f} {figures}", flush=True)


def _variants(shape: str) -> list[tuple[str, dict[str, Any]]]:
    large = shape == "8b"
    bf16 = {
        "model": {"dtype": "bfloat16"} if large else {},
        "training": {"precision": "bf16", **({"activation_checkpointing": "full"} if large else {})},
    }
    compiled = {**bf16, "training": {**bf16["training"], "compile": True}}
    found = [(f"{shape} bf16", bf16), (f"{shape} bf16, compile", compiled)]
    return found if large else [*found, (f"{shape} fp32", {"training": {"precision": "fp32"}})]


def _train(
    folder: Path, name: str, changes: dict[str, Any], weights: dict[str, Any] | None, asked: argparse.Namespace
) -> tuple[Row, dict[str, Any]]:
    """One run from `weights`, or random ones; and the weights from which it began."""
    import torch

    from meshtune.config import from_mapping
    from meshtune.layout.world import connect
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import run

    if asked.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun, first = time.perf_counter(), weights
    made = from_mapping(Recipe, _recipe(folder, name, changes, asked))
    connect(asked.device)
    if first is None:
        first = _random_weights(made, asked.device)
    result, _ = run(made, asked.device, weights=first)
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = rows[SKIPPED_STEPS:]
    shares = [row["mfu"] for row in kept if row["mfu"] is not None]
    return (
        Row(
            name,
            [row["loss"] for row in rows],
            median(row["tokens_per_second"] for row in kept),
            median(shares) if shares else None,
            max(row["peak_memory_bytes"] for row in rows) / 1e9,
            time.perf_counter() - begun,
        ),
        first,
    )


def _random_weights(recipe: Any, device: str) -> dict[str, Any]:
    """Drawn once for all variants, on the CPU in bfloat16: that of 8B takes longer than the training."""
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
    return {key: {**section, **changes.get(key, {})} for key, section in sections.items()}


def _make_inputs(folder: Path, shape: str, steps: int) -> None:
    """A Llama config with a word-level tokenizer, and rows of tokens of unequal lengths, half of each supervised."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    longest, vocabulary = LENGTH[shape], 512 if shape == "tiny" else 128_256
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 4,
        vocab_size=vocabulary,
        tie_word_embeddings=shape != "8b",
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
    parser.add_argument("--attention", default="auto")
    asked = parser.parse_args()
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("no GPU is here; --device cpu --shapes tiny tries the script itself")
    return asked


if __name__ == "__main__":
    main()
