"""The user's own function over rows, and the share of rows that may be unusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening
from meshtune.data.prepare import preview
from meshtune.data.section import DataSection
from meshtune.errors import DataError
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import write_rows


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [{"question": f"hi {'ok ' * n}", "answer": "ok", "score": n} for n in range(4)]
    return write_rows(tmp_path / "a.jsonl", rows)


def ready(path: str, code: str, **settings: Any) -> TokenDataset:
    file = Path(path).parent / "mine.py"
    file.write_text(code, encoding="utf-8")
    section = from_mapping(DataSection, {"train_path": path, "row_function": f"{file}:rows", **settings})
    return Opening(section, kit.words(), 64, cache_dir=file.parent / "cache").training()


PAIR = "{'prompt': row['question'], 'completion': row['answer']}"


def test_a_function_makes_one_row_several_or_none_of_each(path: str) -> None:
    code = f"def rows(row):\n    n = row['score']\n    return None if n == 0 else [{PAIR}] * n if n > 1 else {PAIR}\n"
    data = ready(path, code)
    assert len(data) == 1 + 2 + 3
    assert (data.report.rows_read, data.report.rows_used, data.report.left_out) == (7, 6, 1)
    assert "1 rows left out by data.row_function" in data.report.summary()
    renamed = ready(path, "def rows(row):\n    return row\n", columns={"prompt": "question", "completion": "answer"})
    assert renamed.fingerprint != data.fingerprint and len(renamed) == 4


def test_its_file_is_part_of_the_cache_key(path: str) -> None:
    """A5: the same recipe, another function."""
    first = ready(path, f"def rows(row):\n    return {PAIR}\n")
    again = ready(path, f"def rows(row):\n    return {PAIR}\n")
    assert again.folder == first.folder
    other = ready(path, f"def rows(row):\n    return {PAIR.replace('question', 'answer')}\n")
    assert other.folder != first.folder and other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def rows(row):\n    return 1 / row['score']\n",
            r"a\.jsonl:1: data\.row_function .* line 2: ZeroDivisionError",
        ),
        ("def rows(row):\n    return row['no']\n", r"a\.jsonl:1: .* line 2: KeyError: 'no'"),
        ("def rows(row):\n    return 'x'\n", r"a\.jsonl:1: .* returned str; wanted a dict"),
        ("def rows(row):\n    return [3]\n", r"a\.jsonl:1: .* returned list; wanted a dict"),
        ("def other(row):\n    return row\n", r"has no function rows; it has other"),
        ("import nothing_of_the_kind\n", r"mine\.py cannot be imported: ModuleNotFoundError"),
        ("def rows(row:\n", r"mine\.py cannot be imported: SyntaxError"),
    ],
)
def test_what_goes_wrong_in_it_is_an_error_with_row_and_line(path: str, code: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ready(path, code)


def test_a_function_that_is_not_there(path: str) -> None:
    section = from_mapping(DataSection, {"train_path": path, "row_function": "none/mine.py:rows"})
    with pytest.raises(DataError, match=r"data\.row_function: none/mine\.py: No such file"):
        Opening(section, kit.words(), 64, cache_dir=Path(path).parent / "cache").training()


def test_a_function_that_leaves_everything_out_is_an_error(path: str) -> None:
    with pytest.raises(DataError, match="no row"):
        ready(path, "def rows(row):\n    return None\n")


def test_more_unusable_rows_than_allowed_are_an_error_with_reasons(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good) + "\n" + "{\n" + json.dumps({"messages": []}) + "\n", encoding="utf-8")

    def prepared(share: float | None) -> TokenDataset:
        asked = {} if share is None else {"max_unusable": share}
        section = from_mapping(DataSection, {"train_path": str(path), **asked})
        return Opening(section, kit.words(), 64, cache_dir=tmp_path / "cache").training()

    for share in (None, 0.6, 0.0):
        with pytest.raises(DataError) as error:
            prepared(share)
        said = str(error.value)
        assert "2 of 3 rows cannot be used" in said and f"({share if share is not None else 0.5:g})" in said
        assert f"{path}:2" in said and f"{path}:3" in said and "not valid JSON" in said
    assert len(prepared(0.67)) == 1
    with pytest.raises(DataError, match="2 of 3 rows"):  # from the cache, too
        prepared(0.5)
    section = from_mapping(DataSection, {"train_path": str(path)})
    assert preview(section, str(path), kit.words(), 64).rows_unusable == 2
