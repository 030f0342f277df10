"""One bench for the directory: tiny models, conversations and the recipe that every test changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conversations import make_conversations, make_tokenizer, write_jsonl
from tests.parity.models import save_model
from tests.ranks import Ranks
from tests.resume.runs import Outcome, train

ROWS = 23
GLOBAL_BATCH = 4
# 23 rows in batches of 4: the sixth batch of an epoch is short, and step 7 is the first of the second epoch.
STEPS_PER_EPOCH = 6


class Bench:
    """Models, data and a cache, made once; run folders, each new."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.cache = str(folder / "cache")
        self.tokenizer = make_tokenizer()
        self.train_path = write_jsonl(folder / "train.jsonl", make_conversations(ROWS, seed=0))
        self.validation_path = write_jsonl(folder / "validation.jsonl", make_conversations(5, seed=1))
        self._numbers = count(1)

    def model(self, architecture: str, variant: str = "", **settings: Any) -> Path:
        folder = self.folder / f"{architecture}{variant}"
        if not folder.exists():
            save_model(folder, architecture, self.tokenizer, **settings)
        return folder

    def with_dropout(self) -> Path:
        return self.model("gpt2", "-dropout", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.1)

    def recipe(self, folder: Path, /, run: Path | None = None, **changes: Any) -> dict[str, Any]:
        """Ten steps over one epoch and a part of the next, changed section by section, in a run folder of its own."""
        run = run or self.folder / f"run-{next(self._numbers)}"
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": str(folder)},
            "distributed": {},
            "data": {"train_path": str(self.train_path), "max_seq_length": 40},
            "training": {
                "max_steps": 10,
                "global_batch_size": GLOBAL_BATCH,
                "learning_rate": 0.02,
                "precision": "fp32",
            },
            "optimizer": {"weight_decay": 0.1},
            "lr_scheduler": {"name": "cosine", "warmup_steps": 2},
            "checkpoint": {"dir": str(run), "export": "none"},
            "logging": {"progress": "plain"},
        }
        merged: dict[str, Any] = {name: {**section, **changes.pop(name, {})} for name, section in sections.items()}
        return {**merged, **changes}

    def train(self, recipe: dict[str, Any], world_size: int = 1, stop_after: int | None = None) -> Outcome:
        """Run on ranks of the pool; the outcome on rank 0. The signal reaches the last rank."""
        return self.outcomes(recipe, world_size, stop_after)[0]

    def outcomes(self, recipe: dict[str, Any], world_size: int, stop_after: int | None = None) -> list[Outcome]:
        return self.ranks.call(world_size, train, recipe, self.cache, stop_after, world_size - 1)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume"), ranks)


@pytest.fixture
def run_of() -> Callable[[dict[str, Any]], Path]:
    """The run folder of a recipe."""
    return lambda recipe: Path(recipe["checkpoint"]["dir"])
