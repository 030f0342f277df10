"""The command line inside this process, which saves importing torch for each case; and something to train."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from tests.parity.conversations import make_conversations, make_tokenizer, write_jsonl
from tests.parity.models import save_model


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def meshtune(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Said]:
    """`meshtune("train", "recipe.yaml", ...)`: what the command of these arguments prints, and its exit code."""
    from meshtune.cli import app
    from meshtune.layout.world import disconnect

    cache = str(tmp_path_factory.mktemp("cache"))

    def command(*arguments: object) -> Said:
        # What the command sets for its process must not outlive it here.
        with mock.patch.dict(os.environ, MESHTUNE_CACHE=cache):
            result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        disconnect()
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture(scope="session")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `train.jsonl` and `validation.jsonl`; do not change it."""
    folder = tmp_path_factory.mktemp("things")
    save_model(folder / "model", "llama", make_tokenizer())
    write_jsonl(folder / "train.jsonl", make_conversations(11, seed=0))
    write_jsonl(folder / "validation.jsonl", make_conversations(3, seed=1))
    return folder


@pytest.fixture
def recipe(things: Path, tmp_path: Path) -> Path:
    """A recipe of three steps that runs; its run folder is `run` beside it."""
    return write_recipe(tmp_path, things)


def write_recipe(folder: Path, things: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        f"""\
model:
  name: {things / "model"}
data:
  train_path: {things / "train.jsonl"}
  max_seq_length: 40
training:
  max_steps: 3
  global_batch_size: 4
  learning_rate: 1e-3
  precision: fp32
checkpoint:
  dir: {folder / "run"}
logging:
  progress: none
""",
        encoding="utf-8",
    )
    return path
