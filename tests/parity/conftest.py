"""One bench for the whole directory: models, data and plain courses are made once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshtune.data.packing import pack
from tests.parity.conversations import Message, Row, make_conversations, make_tokenizer, render, write_jsonl
from tests.parity.models import save_model
from tests.parity.reference import Course, Hyperparameters, train_plainly
from tests.parity.runs import course, train
from tests.ranks import Ranks

GLOBAL_BATCH = 12
# Tokens of a pack: two or three conversations.
PACK_LENGTH = 40
LONGEST_ROW = 64


class Bench:
    """Everything that a case needs, kept for the session."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.tokenizer = make_tokenizer()
        self.conversations: dict[str, list[list[Message]]] = {}
        # 31 rows, and as many packs: with global batches of 12, the third is short.
        self.add("train", make_conversations(31, seed=0))
        self.add("packed", make_conversations(73, seed=1))
        self.add("validation", make_conversations(7, seed=2))
        self._models: dict[str, tuple[Path, dict[str, Any]]] = {}
        self._plain: dict[tuple[Any, ...], Course] = {}
        self._numbers = count(1)

    @property
    def cache(self) -> str:
        """What runs take as MESHTUNE_CACHE: rows are encoded, and twins tried, once."""
        return str(self.folder / "cache")

    def add(self, name: str, conversations: list[list[Message]]) -> None:
        """Make a data file of conversations, known by `name`."""
        self.conversations[name] = conversations
        write_jsonl(self.folder / f"{name}.jsonl", conversations)

    def model(
        self,
        architecture: str,
        variant: str = "",
        change: Callable[[nn.Module], None] | None = None,
        **settings: Any,
    ) -> Path:
        """The folder of an architecture; a named variant has other settings, or weights that were changed."""
        name = f"{architecture}-{variant}" if variant else architecture
        if name not in self._models:
            folder = save_model(self.folder / name, architecture, self.tokenizer, change, **settings)
            self._models[name] = folder, settings
        folder, made = self._models[name]
        assert settings in ({}, made), f"two tests call different models {name}"
        return folder

    def rows(self, name: str) -> list[Row]:
        """The conversations of a data file as tokens."""
        return [render(conversation) for conversation in self.conversations[name]]

    def windows(self, packed: bool, size: int = GLOBAL_BATCH, data: str | None = None) -> list[list[Row]]:
        """The rows of each global batch of `size` rows or, packed, of `size` packs."""
        rows = self.rows(data or _data(packed))
        units = [[index] for index in range(len(rows))]
        if packed:
            units = pack([len(row.ids) for row in rows], PACK_LENGTH, range(len(rows)))
        starts = range(0, len(units), size)
        return [[rows[index] for unit in units[s : s + size] for index in unit] for s in starts]

    def plain(
        self, architecture: str, packed: bool, size: int = GLOBAL_BATCH, variant: str = "", **hyperparameters: Any
    ) -> Course:
        """The plain loop's course over the first three global batches; a variant is one that `model` has made."""
        key = (architecture, variant, packed, size, *sorted(hyperparameters.items()))
        if key not in self._plain:
            windows = self.windows(packed, size)[:3]
            folder, validation = self.model(architecture, variant), self.rows("validation")
            self._plain[key] = train_plainly(folder, windows, Hyperparameters(**hyperparameters), validation)
        return self._plain[key]

    def recipe(
        self, model: Path, packed: bool = False, data: str | None = None, **changes: dict[str, Any]
    ) -> dict[str, Any]:
        """A recipe of three optimizer steps that the plain loop can follow, changed section by section."""
        plain = Hyperparameters()
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": str(model)},
            "distributed": {},
            "data": {
                "train_path": str(self.folder / f"{data or _data(packed)}.jsonl"),
                "validation_path": str(self.folder / "validation.jsonl"),
                "shuffle": False,
                "packing": packed,
                "max_seq_length": PACK_LENGTH if packed else LONGEST_ROW,
            },
            "training": {
                "max_steps": 3,
                "global_batch_size": GLOBAL_BATCH,
                "learning_rate": plain.learning_rate,
                "max_grad_norm": plain.max_grad_norm,
                "precision": "fp32",
            },
            "optimizer": {"name": "adamw", "weight_decay": plain.weight_decay, "eps": plain.eps},
            "lr_scheduler": {"name": "cosine"},
            "checkpoint": {"dir": str(self.folder / f"run-{next(self._numbers)}")},
            "logging": {"progress": "none"},
        }
        return {name: {**section, **changes.get(name, {})} for name, section in sections.items()}

    def run(self, world_size: int, recipe: dict[str, Any]) -> tuple[Course, list[dict[str, str]]]:
        """`train`, and the course that it left."""
        digests = self.train(world_size, recipe)
        return course(recipe), digests

    def train(self, world_size: int, recipe: dict[str, Any]) -> list[dict[str, str]]:
        """Train on `world_size` ranks of the pool; each rank's digests of its parameters."""
        return self.ranks.call(world_size, train, recipe, self.cache)


def _data(packed: bool) -> str:
    return "packed" if packed else "train"


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Bench:
    return Bench(tmp_path_factory.mktemp("parity"), ranks)
