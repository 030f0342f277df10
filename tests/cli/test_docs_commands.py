"""Every command, recipe and Python block of README and docs runs, top to bottom, as a reader would run them.

What the pages name is there under the same names: a model folder that is tiny, and files of a few rows. A document is
one test in one folder, so what a block writes is there for the blocks after it. `meshtune` runs inside this process
where it can, which saves importing torch again; `tests/documents.py` says what may be noted above a block.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents import PLAYED, ROOT, Block, blocks

MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")
# The pages are written for a machine with a GPU, and for torch on one.
ON_THIS_MACHINE = {'device="cuda"': 'device="cpu"', 'torch.device("cuda")': 'torch.device("cpu")'}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "away", "to", "sea", "with", "an", "owl"]
FRAGMENT = """
model: {name: HuggingFaceTB/SmolLM2-135M-Instruct}
data: {train_path: data/train.jsonl}
training: {learning_rate: 1e-5}
"""
# What this process can run itself: one command, its output perhaps into a file.
INSIDE = re.compile(
    r"(?P<command>(meshtune|python [\w./-]+\.py)\b(?!.*train .*--nproc)[^|&;<>$`*]*?)(?:> (?P<file>[\w./-]+))?\s*"
)
LANGUAGES = {"bash", "python", "yaml", "json", "jsonl", "text", ""}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a hub holds them: bf16 safetensors, a tokenizer of bytes, a chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def desk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with everything that the pages name, and an environment without hub and launcher."""
    for name in MODELS:
        shutil.copytree(tiny_model, tmp_path / name)
    write_rows(tmp_path / "data")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    programs(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def write_rows(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir()
    for name, count in (("train", 24), ("validation", 6)):
        rows = [{"messages": turn(rng) + turn(rng) * rng.randint(0, 1)} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def turn(rng: random.Random) -> list[dict[str, str]]:
    def says(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 9)))}

    return [says("user"), says("assistant")]


def programs(folder: Path) -> None:
    """`meshtune`, `torchrun` and `python` as this interpreter has them, whether they are installed or not."""
    folder.mkdir()
    modules = {"meshtune": " -m meshtune", "torchrun": " -m torch.distributed.run", "python": ""}
    for name, module in modules.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)


class Player:
    """Runs the blocks of one document in the current directory."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.output = ""

    def play(self, block: Block) -> None:
        if "not run" in block.notes:
            return
        text = block.text
        for there, here in ON_THIS_MACHINE.items():
            text = text.replace(there, here)
        written = block.notes.get("file") or named_in_first_line(text)
        if written:
            Path(written).parent.mkdir(parents=True, exist_ok=True)
            Path(written).write_text(text, encoding="utf-8")
        if block.language == "bash":
            self.output = "".join(self.command(block, part) for part in commands(block, text))
        elif block.language == "python" and not written:
            self.python(block, text)
        elif block.language == "yaml":
            recipe(block, text, written)
        elif block.language == "jsonl":
            rows(text)
        elif "output" in block.notes:
            same_output(block, self.output)

    def command(self, block: Block, text: str) -> str:
        code = int(block.notes.get("exits", 0))
        inside = INSIDE.fullmatch(text)
        if inside:
            return run_inside(block, shlex.split(inside["command"], comments=True), inside["file"], code)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            capture_output=True,
            encoding="utf-8",
            timeout=300,
            check=False,
        )
        told = f"{block.place} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == code, told
        return done.stdout + (done.stderr if code else "")

    def python(self, block: Block, text: str) -> None:
        program = compile("\n" * block.line + text, str(block.document), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(program, self.namespace)
        self.output = stream.getvalue()


def commands(block: Block, text: str) -> list[str]:
    """The commands of a block, one by one where that is what they are; the last may end with another code than 0."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    whole = "exits" in block.notes or any(re.search(r"<<|^(for|if|while|cd|export)\b", line) for line in lines)
    return [text] if whole else lines


def run_inside(block: Block, words: list[str], file: str | None, code: int) -> str:
    """Run one `meshtune` command or Python script in this process; returns what it printed, or writes it to `file`."""
    from meshtune.cli import app

    ended: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                ended = app(words[1:], standalone_mode=False) or 0
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code, f"{block.place}: {shlex.join(words)} ended with {ended}:\n{err.getvalue()[-4000:]}"
    if file is None:
        return out.getvalue() + (err.getvalue() if code else "")
    Path(file).write_text(out.getvalue(), encoding="utf-8")
    return ""


def named_in_first_line(text: str) -> str | None:
    """`name.yaml` of a block whose first line is `# name.yaml`: the file that the reader is told to write."""
    match = re.match(r"# ([\w./-]+\.(?:yaml|py))\n", text)
    return match[1] if match else None


def recipe(block: Block, text: str, written: str | None) -> None:
    """A whole recipe, or sections laid over a smallest one, which says no key that is not there."""
    from meshtune.config import load
    from meshtune.recipes.recipe import Recipe

    if written:
        load(Recipe, written)
        return
    Path("smallest.yaml").write_text(FRAGMENT, encoding="utf-8")
    fragment = Path(f"fragment-{block.line}.yaml")
    fragment.write_text(f"base: smallest.yaml\n{text}", encoding="utf-8")
    load(Recipe, fragment)


def rows(text: str) -> None:
    """Rows that the page shows as usable are: each of them becomes tokens with something to learn."""
    from transformers import AutoTokenizer

    from meshtune.data.prepare import preview
    from meshtune.data.section import DataSection

    Path("shown.jsonl").write_text(text, encoding="utf-8")
    section = DataSection(train_path="shown.jsonl")
    report = preview(section, "shown.jsonl", AutoTokenizer.from_pretrained(MODELS[0]), 2048)
    assert report.rows_used == report.rows_read > 0, report.summary()


def same_output(block: Block, output: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(block.text, output, flags)
    assert same, f"{block.place} shows\n{block.text}\nbut it is\n{output}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands of the pages are written for bash")
@pytest.mark.parametrize("document", PLAYED, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_every_block_of_the_page_runs(document: Path, desk: Path) -> None:
    player = Player()
    for block in blocks(document):
        assert block.language in LANGUAGES, f"{block.place}: unknown language {block.language}"
        player.play(block)
