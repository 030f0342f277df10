"""Reading: bytes as people's tools write them, files that are not what they should be, rows that cannot be
used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshtune.data.formats import conversation, plain_text
from meshtune.data.recognise import detect_format
from meshtune.data.rows import Row, UnusableRow
from meshtune.data.sources import HubSource, is_hub_id, open_sources
from meshtune.errors import DataError


def rows_of(*paths: Path) -> list[Row]:
    return [row for source in open_sources([str(path) for path in paths]) for row in source.rows()]


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_bom_crlf_blank_lines_and_line_separators(tmp_path: Path) -> None:
    """C17: two rows without \\r or BOM, named by their line; a text with U+2028 stays whole."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    assert [(row.name, row.columns) for row in rows_of(path)] == [
        (f"{path}:1", {"text": "one"}),
        (f"{path}:3", {"text": "two"}),
    ]
    path.write_text('{"text": "a\u2028b\u0085c"}', encoding="utf-8")
    assert [row.columns for row in rows_of(path)] == [{"text": "a\u2028b\u0085c"}]


def test_rows_keep_their_own_columns_and_types(tmp_path: Path) -> None:
    """C13, C19: nothing is unified over rows or files, and an explicit null stays."""
    calls = [{"arguments": {"x": 1}}, {"arguments": {"y": "s", "x": None}}, {"arguments": {"x": "1"}}]
    first = write_lines(tmp_path / "a.jsonl", *({"messages": [call]} for call in calls), {"n": 1})
    second = write_lines(tmp_path / "b.jsonl", {"messages": [], "extra": {"deep": [1]}})
    got = [row.columns for row in rows_of(first, second)]
    assert got == [
        *({"messages": [call]} for call in calls),
        {"n": 1},
        {"messages": [], "extra": {"deep": [1]}},
    ]


def test_unreadable_lines_are_rows_with_a_name_and_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": \n[1]\n{"text": "\xff"}\n"x"\n{"text": "cut')
    problems = [(row.name.rsplit(":")[-1], row.problem.reason) for row in rows_of(path) if row.problem]
    assert problems == [
        ("2", "not valid JSON"),
        ("3", "not a JSON object"),
        ("4", "not UTF-8"),
        ("5", "not a JSON object"),
        ("6", "not valid JSON"),
    ]


def test_a_json_file_is_a_list_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\ufeff[{"text": "a"},\n {"text": "b"}, 3]', encoding="utf-8")
    assert [(r.name, r.columns) for r in rows_of(path)][:2] == [
        (f"{path}:row 0", {"text": "a"}),
        (f"{path}:row 1", {"text": "b"}),
    ]
    write_lines(path, {"text": "a"}, {"text": "b"})
    assert [row.name for row in rows_of(path)] == [f"{path}:1", f"{path}:2"]
    path.write_text('[{"text": "a"},\n {"text"', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.json:2: not valid JSON"):
        rows_of(path)


def test_parquet_rows_are_named_and_lose_the_nulls_that_columns_brought(tmp_path: Path) -> None:
    """C13 in columnar files, where every struct has the fields of all rows."""
    messages = [[{"role": "user", "content": "a", "args": {"x": 1}}], [{"role": "user", "args": {"y": "s"}}]]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages, "image": [b"1", b"2"]}), path)
    first, second = rows_of(path)
    assert (first.name, first.columns) == (f"{path}:row 0", {"messages": messages[0]})
    assert second.columns == {"messages": messages[1]}
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        rows_of(path)


def test_what_is_no_data_file_is_refused_at_once_and_all_together(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / name) for name in ("missing.jsonl", "empty.jsonl", "a.txt", "*.json", "folder")]
    with pytest.raises(DataError) as error:
        open_sources(paths)
    lines = str(error.value).splitlines()
    for line, words in zip(
        lines, ["no such file", "is empty", "suffix .txt", "matches no", "no data file"], strict=True
    ):
        assert words in line
    assert "hub id" in lines[0] and ".parquet" in lines[0]
    with pytest.raises(DataError, match="no data file"):
        open_sources([])


def test_utf16_is_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        rows_of(path)


def test_hub_ids_are_told_from_paths_and_loaded_with_their_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    assert is_hub_id("org/name-1.0") and not is_hub_id("data/train.jsonl") and not is_hub_id("meshtune/data")
    asked = []

    def load(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        if kwargs["split"] == "none":
            raise ValueError("Unknown split")
        return datasets.Dataset.from_list([{"text": "a", "n": 1}, {"text": "b", "n": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (source,) = open_sources("org/name", split="train[:2]", hub_config="small")
    assert [(row.name, row.columns) for row in source.rows()] == [
        ("org/name[train[:2]]:row 0", {"text": "a"}),
        ("org/name[train[:2]]:row 1", {"text": "b"}),
    ]
    assert asked == [(("org/name", "small"), {"split": "train[:2]"})]
    with pytest.raises(DataError, match=r"org/name\[none\]: cannot be loaded: Unknown split"):
        HubSource("org/name", "none", None).digest()


def test_format_is_decided_by_columns_and_a_misfit_names_file_and_columns(tmp_path: Path) -> None:
    """C20: the error comes from the first rows, with the wanted and the found columns."""
    chat = write_lines(tmp_path / "chat.jsonl", 3, {"messages": [], "text": "x"})
    text = write_lines(tmp_path / "text.jsonl", {"text": "x", "n": 1}, {"other": 1})
    wrong = write_lines(tmp_path / "wrong.jsonl", {"dialogue": [], "id": 3})
    assert detect_format(open_sources(str(chat)), "auto") == "messages"
    assert detect_format(open_sources(str(chat)), "text") == "text"
    assert detect_format(open_sources(str(text)), "auto") == "text"
    with pytest.raises(DataError) as error:
        detect_format(open_sources([str(chat), str(wrong)]), "auto")
    for words in (str(wrong), "`messages`", "`dialogue`, `id`", "data.columns"):
        assert words in str(error.value)
    with pytest.raises(DataError, match=r"text\.jsonl: wanted a column `messages`, found `text`, `n`, `other`"):
        detect_format(open_sources([str(text)]), "messages")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    with pytest.raises(DataError, match=r"broken\.jsonl:1: not valid JSON"):
        detect_format(open_sources(str(broken)), "auto")
    broken.write_text("\n\n")
    with pytest.raises(DataError, match="no row"):
        detect_format(open_sources(str(broken)), "auto")


USER, SAYS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": "x"}, "no column `messages`"),
        ({"messages": None}, "no column `messages`"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": [USER, "b"]}, "a message is not an object"),
        ({"messages": [{"from": "user", "value": "a"}]}, "a message has no role"),
        ({"messages": [USER]}, "no message has the role assistant"),
        ({"messages": [USER, {"role": "assistant"}]}, "a message has no content"),
        ({"messages": [{"role": "user", "content": 3}, SAYS]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAYS]}, "a content part is not"),
        ({"messages": [USER, {**SAYS, "tool_calls": {}}]}, "`tool_calls` is not a list"),
        ({"messages": [USER, SAYS], "tools": "{"}, "`tools` is not valid JSON"),
        ({"messages": [USER, SAYS], "tools": ["f"]}, "`tools` is not a list of JSON schemas"),
    ],
)
def test_conversations_that_cannot_be_used_say_why(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow) as error:
        conversation(columns)
    assert reason in error.value.problem.reason


def test_conversations_that_can_be_used() -> None:
    assert conversation({"messages": [USER, SAYS], "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]
    assert conversation({"messages": [USER, SAYS], "tools": None}).tools is None
    called = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert conversation({"messages": [USER, called]}).messages[1] == called


@pytest.mark.parametrize("text", [None, 3, "", " \n"])
def test_texts_that_cannot_be_used(text: Any) -> None:
    with pytest.raises(UnusableRow):
        plain_text({"text": text})
