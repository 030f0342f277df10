"""Rows in files, and what ranks make of them, for the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshtune.data.batch import Batch
from meshtune.data.loader import Loader


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """A JSONL file; returns its path as recipes have it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def loaders(order: Any, world_size: int, size: int = 1) -> list[Loader]:
    """The loader of every rank, for micro-batches of `size` rows or packs."""
    return [
        Loader(order, rank=rank, world_size=world_size, per_device_batch_size=size, pad_token_id=0)
        for rank in range(world_size)
    ]


def global_batches(ranks: list[Loader], count: int, cursor: Any = None) -> tuple[list[list[Batch]], Any]:
    """The next `count` global batches, from `cursor` if there is one: what ranks have, in turn. And the cursor behind them, which
    all ranks agree on.
    """
    for loader in ranks:
        if cursor is not None:
            loader.load_state_dict(cursor)
    found = []
    for _ in range(count):
        rounds = zip(*(loader.next() for loader in ranks), strict=True)
        found.append([batch for batches in rounds for batch in batches])
    states = [loader.state_dict() for loader in ranks]
    assert all(state == states[0] for state in states)
    return found, states[0]
