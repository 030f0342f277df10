"""meshtune prepare: what it leaves is what training uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshtune.data import encode_block
from tests.cli.conftest import Said

Command = Callable[..., Said]


def test_training_finds_what_was_prepared(meshtune: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = meshtune("prepare", recipe, "data.max_seq_length=37", "distributed.tp_size=2")
    assert said.code == 0, said.err
    assert "train.jsonl: 11 of 11 rows used" in said.out and "kept in " in said.out
    folder = Path(said.out.split("fingerprint ")[1].splitlines()[0].split(", ")[1])
    assert (folder / "manifest.json").is_file()
    monkeypatch.setattr(encode_block.BlockEncoder, "__init__", lambda *args: pytest.fail("rows are encoded again"))
    assert meshtune("prepare", recipe, "data.max_seq_length=37").out == said.out
    trained = meshtune("train", recipe, "data.max_seq_length=37")
    assert trained.code == 0, trained.err
    assert "11 of 11 rows used" in trained.out


def test_validation_sets_are_prepared_by_name(meshtune: Command, recipe: Path, things: Path) -> None:
    path = things / "validation.jsonl"
    said = meshtune("prepare", recipe, f"data.validation_path={{chat: {path}, again: {path}}}")
    assert said.code == 0, said.err
    assert f"validation  chat: {path}: 3 of 3 rows used" in said.out and "validation  again: " in said.out


def test_how_full_packs_are_is_known_before_training(meshtune: Command, recipe: Path) -> None:
    said = meshtune("prepare", recipe, "data.packing=true", "data.max_seq_length=64")
    assert said.code == 0, said.err
    note = re.search(r"data        (\d+ packs of up to 64 tokens, [\d.]+% full; .*)", said.out)
    assert note is not None, said.out
    assert note[1] in meshtune("train", recipe, "data.packing=true", "data.max_seq_length=64").out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_path=none.jsonl", "none.jsonl"),
        ("data.max_seq_length=100000", "data.max_seq_length"),
        ("data.format=text", "wanted a column `text`"),
        ("data.columns={message: x}", "names 'message'"),
        ("data.row_function=none.py:rows", "none.py"),
        ("model.name=nowhere/at/all", "there is no folder nowhere/at/all"),
    ],
)
def test_what_cannot_be_prepared_is_an_error_before_training(
    meshtune: Command, recipe: Path, override: str, says: str
) -> None:
    said = meshtune("prepare", recipe, override)
    assert said.code == 2
    assert says in said.err and "Traceback" not in said.err
