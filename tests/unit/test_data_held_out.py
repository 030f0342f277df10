"""Rows kept apart for validation: chosen by the seed, in no other set, and never torn from the rest of their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.config import from_mapping
from meshtune.data.held_out import hold_out
from meshtune.data.opening import Finite, Opening
from meshtune.data.section import DataSection
from meshtune.errors import DataError, RecipeError
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import write_rows

Write = Callable[..., str]
TOKENIZER = kit.byte_level("chatml")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, *rows: Any) -> str:
        return write_rows(tmp_path / name, rows)

    return write


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def opened(
    path: Any, tmp_path: Path, seed: int = 42, length: int = 256, **settings: Any
) -> tuple[Any, dict[str, Finite]]:
    section = from_mapping(DataSection, {"train_path": path, **settings})
    opening = Opening(section, TOKENIZER, length, 1000, tmp_path / "cache", seed=seed)
    return opening.training(), opening.validation()


def texts(data: Any) -> list[tuple[int, ...]]:
    return [tuple(data[index][0].tolist()) for index in range(len(data))]


@pytest.fixture
def rows(write: Write) -> str:
    return write("a.jsonl", *[chat("hi " * (n + 1), "ok") for n in range(20)])


@pytest.mark.parametrize(("size", "count"), [(5, 5), (0.25, 5), (0.01, 1), (19, 19)])
def test_a_count_or_a_fraction_and_no_row_in_both(rows: str, tmp_path: Path, size: float, count: int) -> None:
    (whole, _), (training, sets) = opened(rows, tmp_path), opened(rows, tmp_path, validation_size=size)
    held = sets[""]
    assert (len(training), len(held)) == (20 - count, count)
    assert sorted([*texts(training), *texts(held)]) == sorted(texts(whole))
    kept = [text for text in texts(whole) if text not in set(texts(held))]
    assert texts(training) == kept  # in file order
    assert held.report.tokens == sum(map(len, texts(held))) == int(held.lengths.sum())
    assert training.report.tokens == sum(map(len, kept))


def test_the_seed_chooses_and_the_fingerprint_tells(rows: str, tmp_path: Path) -> None:
    (first, held), (again, _) = (opened(rows, tmp_path, validation_size=5) for _ in range(2))
    other, others = opened(rows, tmp_path, seed=7, validation_size=5)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert texts(held[""]) != texts(others[""])
    assert first.fingerprint != opened(rows, tmp_path)[0].fingerprint


def test_parts_of_one_text_stay_together(write: Write, tmp_path: Path) -> None:
    """A text that validation has seen the start of would be no test of its rest."""
    lengths = [3, 20, 9, 33, 8, 1, 17, 40]
    letters = [chr(ord("A") + n) for n in range(len(lengths))]  # of each text its own, which merge with no other
    path = write("a.jsonl", *[{"text": letter * length} for letter, length in zip(letters, lengths, strict=True)])
    whole, _ = opened(path, tmp_path, length=8, overlong="split", shuffle=False)
    assert max(whole.lengths) == 8 and len(whole) > len(lengths)
    training, sets = opened(path, tmp_path, length=8, overlong="split", validation_size=3)
    assert sorted([*texts(training), *texts(sets[""])]) == sorted(texts(whole))

    def words(data: Any) -> set[int]:
        return {token for text in texts(data) for token in text} - {TOKENIZER.eos_token_id}

    assert not words(training) & words(sets[""])


def test_each_weighted_source_gives_its_share(write: Write, tmp_path: Path) -> None:
    one = write("one.jsonl", *[chat("hi " * (n + 1), "ok") for n in range(30)])
    two = write("two.jsonl", *[chat("ok " * (n + 1), "hi") for n in range(10)])
    sources = [{"path": one, "weight": 1}, {"path": two, "weight": 3}]
    training, sets = opened(sources, tmp_path, validation_size=0.1)
    assert (len(training), len(sets[""])) == (36, 4)
    training, sets = opened(sources, tmp_path, validation_size=8)
    assert (len(training), len(sets[""])) == (32, 8)


def test_something_must_be_left_to_train_on(rows: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="20 rows in all"):
        opened(rows, tmp_path, validation_size=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_size": 2, "validation_path": "v.jsonl"}, "leave one of them out"),
        ({"validation_size": 1.5}, "a fraction below 1, or a whole number"),
        ({"validation_size": 0}, "validation_size"),
        ({"validation_size": 2, "streaming": True}, "name a validation_path"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_mapping(DataSection, {"train_path": "a.jsonl", **settings})


def test_documents_are_those_of_the_whole(rows: str, tmp_path: Path) -> None:
    whole, _ = opened(rows, tmp_path)
    training, held = hold_out(whole, 4, 1, None)
    for part in (training, held):
        for index in range(len(part)):
            ids, flags = part[index]
            assert part.lengths[index] == len(ids) == len(flags)
            assert part.supervised_counts[index] == int(np.sum(flags[1:]))
        with pytest.raises(IndexError):
            part[len(part)]
