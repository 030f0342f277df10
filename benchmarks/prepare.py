"""Preparation of chat rows beside the tokenizer library alone, on the same rendered texts, alternating, each in a process of
its own.

    python -m benchmarks.prepare --tokenizer FOLDER --rows 100000

The tokenizer's own rate is that of `encode_batch` of `tokenizers`, with all its threads, on texts in memory that are rendered
already. Preparation is all of `meshtune prepare` behind the recipe: JSON read, rendered, tokenised, masked, counted, written,
with the start of its worker processes. Prints rows and tokens a second of both and the ratio of the two with its spread; and
the ratio of the CPU seconds that they took, which says the same on a machine that has other work to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS_A_MESSAGE = 45  # the mean; with 2 to 6 messages a row, some 250 tokens


def main() -> None:
    """Run as asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="examples/tiny-model", help="a folder with a fast tokenizer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="data.num_workers (default: one for each core)")
    parser.add_argument("--train-path", help="rows of your own instead of made ones")
    parser.add_argument("--part", choices=("render", "alone", "prepare"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked)))
        return
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = Path(folder)
        compare(asked)


def compare(asked: argparse.Namespace) -> None:
    """Measure both in turn and print what came of it."""
    rendered = run("render", asked)
    print(f"{rendered['rows']:,} rows, {rendered['characters'] / rendered['rows']:,.0f} characters each")
    ratios: list[float] = []
    efforts: list[float] = []
    for number in range(asked.rounds):
        alone, prepared = run("alone", asked), run("prepare", asked)
        ratios.append(alone["seconds"] / prepared["seconds"])
        efforts.append(alone["cpu_seconds"] / prepared["cpu_seconds"])
        for name, found in (("tokenizer alone", alone), ("prepare", prepared)):
            pace = f"{rendered['rows'] / found['seconds']:10,.0f} rows/s {found['tokens'] / found['seconds']:14,.0f} tokens/s"
            times = f"{found['seconds']:8.2f} s {found['cpu_seconds']:8.2f} CPU s"
            print(f"round {number + 1}  {name:16} {times} {pace}")
        print(f"round {number + 1}  ratio {ratios[-1]:.3f}, of CPU seconds {efforts[-1]:.3f}", flush=True)
    for name, found in (("rates", ratios), ("CPU seconds", efforts)):
        print(f"ratio of {name} {statistics.median(found):.3f} (median; {min(found):.3f} to {max(found):.3f})")


def run(part: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run one part in a process of its own, and return what it says."""
    command = [sys.executable, "-m", "benchmarks.prepare", *sys.argv[1:], "--part", part, "--folder", str(asked.folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return json.loads(done.stdout.splitlines()[-1])


def render(asked: argparse.Namespace) -> dict[str, Any]:
    """Write the rows, and their rendered texts."""
    tokenizer = load(asked.tokenizer)
    path = rows_path(asked)
    if not asked.train_path:
        with path.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made_rows(tokenizer, asked.rows))
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    texts = [tokenizer.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False) for r in rows]
    (asked.folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    return {"rows": len(rows), "characters": sum(map(len, texts))}


def alone(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokenise the rendered texts, and nothing else."""
    texts = json.loads((asked.folder / "texts.json").read_text(encoding="utf-8"))
    tokenizer = load(asked.tokenizer).backend_tokenizer
    tokenizer.encode_batch(texts[:64], add_special_tokens=False)  # starts the threads
    with Stopwatch() as took:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return {**took.as_dict(), "tokens": sum(len(encoding) for encoding in encoded)}


def prepare(asked: argparse.Namespace) -> dict[str, Any]:
    """Prepare the rows as a run does, into a cache that holds nothing."""
    from meshtune.config import from_mapping
    from meshtune.data.opening import Opening
    from meshtune.data.section import DataSection

    settings = {"train_path": str(rows_path(asked)), "num_workers": asked.workers}
    section, tokenizer = from_mapping(DataSection, settings), load(asked.tokenizer)
    with tempfile.TemporaryDirectory(dir=asked.folder) as cache:
        with Stopwatch() as took:
            data = Opening(section, tokenizer, 1 << 20, cache_dir=cache).training()
        return {**took.as_dict(), "tokens": data.report.tokens}


class Stopwatch:
    """Seconds of the clock and of the CPU, those of ended child processes included."""

    def __enter__(self) -> Stopwatch:
        self._wall, self._times = time.perf_counter(), os.times()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = sum(os.times()[:4]) - sum(self._times[:4])

    def as_dict(self) -> dict[str, float]:
        """Return what was measured."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}


PARTS = {"render": render, "alone": alone, "prepare": prepare}


def load(folder: str) -> Any:
    """Return the tokenizer, with a template if it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    return tokenizer


def rows_path(asked: argparse.Namespace) -> Path:
    """Return where the rows lie."""
    return Path(asked.train_path) if asked.train_path else asked.folder / "rows.jsonl"


def made_rows(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return chat rows of one to three turns, of words of the vocabulary: common ones often, rare ones rarely."""
    random_numbers = random.Random(0)
    known = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in known if token[:1] in "Ġ▁" and token[1:].isascii() and token[1:].isalpha()]
    words = words or ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "away", "to", "sea", "with", "an", "owl"]
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(words))))

    def text() -> str:
        length = max(1, round(random_numbers.lognormvariate(math.log(WORDS_A_MESSAGE) - 0.32, 0.8)))
        chosen = random_numbers.choices(words, cum_weights=weights, k=length)
        return " ".join(chosen).capitalize() + random_numbers.choice(".?!")

    rows = []
    for _ in range(count):
        turns = random_numbers.randint(1, 3)
        roles = ["user", "assistant"] * turns
        rows.append({"messages": [{"role": role, "content": text()} for role in roles]})
    return rows


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
