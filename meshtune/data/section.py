"""The `data` section of a recipe: what is read, how a row becomes tokens, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.data.sources import is_hub_id

Format = Literal["auto", "messages", "text"]
Overlong = Literal["truncate", "drop", "split", "error"]

_SET_NAME = re.compile(r"[A-Za-z0-9_]+")


class DataSection(Section):
    """What the model learns from, and how its rows become batches."""

    train_path: str | list[str] = Field(
        description="Training data: a .jsonl, .json or .parquet file, a list of them, or a hub id (org/name)."
    )
    validation_path: str | list[str] | dict[str, str | list[str]] | None = Field(
        default=None,
        description="Validation data, in the same forms, or several sets by name (`{chat: a.jsonl, code: b.jsonl}`), each with "
        "metrics of its own. Losses are token-weighted.",
    )
    train_split: str | None = Field(
        default=None, description="Split of a hub id to train on (default: train). Hub ids only."
    )
    validation_split: str | None = Field(
        default=None, description="Split of a hub id to validate on (default: validation). Hub ids only."
    )
    hub_config: str | None = Field(default=None, description="Configuration (subset) of a hub id. Hub ids only.")
    format: Format = Field(
        default="auto",
        description="`messages` (OpenAI chat rows), `text` (plain text rows), or `auto`: by the columns.",
    )
    shuffle: bool = Field(default=True, description="Permute the rows each epoch, by the seed; false: file order.")
    packing: bool = Field(
        default=False,
        description="Pack rows, isolated from each other, up to max_seq_length; no padding is computed.",
    )
    max_seq_length: int | None = Field(
        default=None,
        description="Longest row, in tokens (default: the model's positions, at most 2048).",
    )
    overlong: Overlong = Field(
        default="truncate",
        description="Rows longer than max_seq_length: `truncate` keeps the start, `drop` leaves the row out, "
        "`split` makes consecutive rows of it, `error` stops and names the row.",
    )
    drop_last: bool = Field(
        default=False, description="Leave out an epoch's last, short global batch instead of training on it."
    )

    @property
    def validation_sets(self) -> dict[str, str | list[str]]:
        """The paths of each validation set by its name; one set alone has the name ""."""
        if self.validation_path is None:
            return {}
        return self.validation_path if isinstance(self.validation_path, dict) else {"": self.validation_path}

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield (key, message) for each combination inside this section that cannot be meant."""
        if self.max_seq_length is not None and self.max_seq_length < 2:
            yield "max_seq_length", f"is {self.max_seq_length}, but a row needs 2 tokens to hold one target"
        for key, sets in (("train_path", {"": self.train_path}), ("validation_path", self.validation_sets)):
            for paths in sets.values():
                if any(not path.strip() for path in as_list(paths)) or paths == []:
                    yield key, "is empty; name a file, a list of files or a hub id"
        if self.validation_path == {}:
            yield "validation_path", "names no set; write {name: path}, a path, or leave it out"
        for name in self.validation_sets:
            if name and not _SET_NAME.fullmatch(name):
                yield (
                    "validation_path",
                    f"the name {name!r} becomes part of metrics' names: write letters, digits and _ only",
                )
        yield from self._hub_problems()

    def _hub_problems(self) -> Iterable[tuple[str, str]]:
        train = any(is_hub_id(path) for path in as_list(self.train_path))
        validation = any(is_hub_id(path) for paths in self.validation_sets.values() for path in as_list(paths))
        if self.train_split is not None and not train:
            yield "train_split", "has no effect: train_path names no hub id"
        if self.validation_split is not None and not validation:
            yield "validation_split", "has no effect: validation_path names no hub id"
        if self.hub_config is not None and not (train or validation):
            yield "hub_config", "has no effect: neither train_path nor validation_path names a hub id"


def as_list(paths: str | list[str] | None) -> list[str]:
    """Return the paths of a setting that takes one path, several, or none."""
    if paths is None:
        return []
    return [paths] if isinstance(paths, str) else list(paths)
