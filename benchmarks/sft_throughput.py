"""Tokens per second and peak memory of fine-tuning on chat rows, beside a plain transformers loop, in one run.

    python benchmarks/sft_throughput.py [--rows 64] [--repeat 3]

Each contender trains the same random 25M-parameter model on the same conversations, in fp32, in a process of its own,
one after another, `--repeat` times in turn. Printed: medians over the steps after the first, and the ratio to the loop.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTENDERS = ("loop", "padded", "packed")
ROWS_A_STEP = 8
LENGTH = 512
WORDS = [
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"),
    *("as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "had", "by"),
]


def make_inputs(folder: Path, rows: int) -> None:
    """A model folder with a word-level chat tokenizer, and conversations of unequal lengths, about half supervised."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = WORDS + [f"word{i}" for i in range(30_000)]
    names = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", *words]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=LENGTH,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    chooser = random.Random(0)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as out:
        for _ in range(rows):
            turns = [
                " ".join(chooser.choices(words, k=chooser.randint(5, 110))) for _ in range(2 * chooser.randint(1, 2))
            ]
            messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(turns)]
            out.write(json.dumps({"messages": messages}) + "\n")


def plain_loop(folder: Path) -> list[float]:
    """The loop that a user would write: pad to the longest row, let transformers compute the loss. Tokens per second."""
    import torch
    from transformers import AutoModelForCausalLM

    from meshtune.data import collate, prepare, section

    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = _dataset(folder, prepare, section)
    rates = []
    for start in range(0, len(rows), ROWS_A_STEP):
        batch = collate.collate_padded([rows[i] for i in range(start, min(start + ROWS_A_STEP, len(rows)))], 0)
        labels = torch.full_like(batch.input_ids, -100)
        labels[:, 1:] = batch.shift_labels[:, :-1]
        begin = time.perf_counter()
        mask = batch.attention_mask
        model(input_ids=batch.input_ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(batch.tokens / (time.perf_counter() - begin))
    return rates


def _dataset(folder: Path, prepare, section):
    from transformers import AutoTokenizer

    settings = section.DataSection(train_path=str(folder / "train.jsonl"))
    return prepare.prepare_training(settings, AutoTokenizer.from_pretrained(folder), LENGTH, folder / "cache")


def meshtune_run(folder: Path, packing: bool) -> list[float]:
    import meshtune

    run = folder / f"run-{packing}"
    meshtune.train(
        {
            "model": {"name": str(folder)},
            "data": {
                "train_path": str(folder / "train.jsonl"),
                "shuffle": False,
                "packing": packing,
                "max_seq_length": LENGTH,
            },
            "training": {
                "learning_rate": 1e-4,
                "epochs": 1,
                "precision": "fp32",
                "per_device_batch_size": 4 if packing else ROWS_A_STEP,
            },
            "checkpoint": {"dir": str(run), "export": "none", "resume": "never"},
            "logging": {"progress": "none"},
        }
    )
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["tokens_per_second"] for row in map(json.loads, lines) if "loss" in row]


def contend(name: str, folder: Path) -> None:
    from meshtune.observe import peak_memory_bytes

    rates = plain_loop(folder) if name == "loop" else meshtune_run(folder, name == "packed")
    print(json.dumps({"rates": rates, "peak_memory_bytes": peak_memory_bytes("cpu")}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.contender:
        return contend(asked.contender, asked.folder)
    results: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for _ in range(asked.repeat):
        with tempfile.TemporaryDirectory() as folder:
            make_inputs(Path(folder), asked.rows)
            for name in CONTENDERS:
                command = [sys.executable, __file__, "--contender", name, "--folder", folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    report(results)
    return None


def report(results: dict[str, list[dict]]) -> None:
    rates = {name: statistics.median(r for run in runs for r in run["rates"][1:]) for name, runs in results.items()}
    print(f"{'':8} {'tokens/s':>9} {'ratio':>6} {'peak GB':>8}")
    for name, runs in results.items():
        peak = statistics.median(run["peak_memory_bytes"] for run in runs) / 1e9
        print(f"{name:8} {rates[name]:9.0f} {rates[name] / rates['loop']:6.2f} {peak:8.2f}")


if __name__ == "__main__":
    main()
