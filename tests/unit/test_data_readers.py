"""Files in the forms that people have: tables, Arrow, compressed text, folders and patterns; each broken in its ways."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshtune.data.reading import Reading
from meshtune.data.rows import Row
from meshtune.data.sources import open_sources
from meshtune.errors import DataError


def rows_of(path: Any, reading: Reading | None = None) -> list[Row]:
    return [row for source in open_sources(str(path), reading=reading) for row in source.rows()]


def columns_of(path: Any) -> list[Any]:
    return [row.columns for row in rows_of(path)]


def problems_of(path: Any) -> dict[str, str]:
    return {row.name.removeprefix(f"{path}:"): row.problem.reason for row in rows_of(path) if row.problem}


def zstandard(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


def test_csv_keeps_quoted_text_and_names_rows_by_their_first_line(tmp_path: Path) -> None:
    """C17: BOM and CRLF are no part of texts; a quoted cell keeps its own line feeds, commas and U+2028."""
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffprompt, completion\r\n"a\nb, ""c""",d\r\n\r\nx\u2028y,\r\n'.encode())
    assert [(row.name, row.columns) for row in rows_of(path)] == [
        (f"{path}:2", {"prompt": 'a\nb, "c"', "completion": "d"}),
        (f"{path}:5", {"prompt": "x\u2028y", "completion": ""}),
    ]
    tabs = tmp_path / "a.tsv"
    tabs.write_text("text\tn\na, b\t1\n", encoding="utf-8")
    assert columns_of(tabs) == [{"text": "a, b", "n": "1"}]


def test_csv_rows_that_are_broken_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\na,1\nb\nc,1,2\nd\xff,1\n"e"x,1\nf,1\n')
    assert problems_of(path) == {
        "3": "not as many cells as the header",
        "4": "not as many cells as the header",
        "5": "not UTF-8",
        "6": "not valid CSV",
    }
    assert [columns["text"] for columns in columns_of(path) if columns] == ["a", "f"]
    long = "x" * 200_000
    path.write_text(f"text,n\n{long},1\n", encoding="utf-8")
    assert columns_of(path)[0]["text"] == long


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('text,n\na,1\n"b,1\nc,1\n', ":3: a quoted cell of this row is never closed"),
        ("text,n,text\n", ":1: the header names text more than once"),
        ("text;n\na;1\n", ":1: the header is 'text;n'"),
        ("\n\n", ":1: has no header"),
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
def test_csv_files_that_cannot_be_read_as_a_whole(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        rows_of(path)
    assert words in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("inner", [".jsonl", ".json", ".csv"])
def test_compressed_text_is_read_and_named_as_the_plain_file_is(tmp_path: Path, suffix: str, inner: str) -> None:
    content = {".jsonl": '{"text": "a\u2028b"}\n\n{"text": "c"}\n', ".json": '[{"text": "a"}]', ".csv": "text\na\n"}[
        inner
    ]
    plain, path = tmp_path / f"a{inner}", tmp_path / f"a{inner}{suffix}"
    plain.write_text(content, encoding="utf-8")
    path.write_bytes(COMPRESS[suffix](content.encode()))
    want = [(row.name.replace(str(plain), str(path)), row.columns) for row in rows_of(plain)]
    assert want and [(row.name, row.columns) for row in rows_of(path)] == want


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "not compressed"])
def test_damaged_compressed_files_are_told_by_name(tmp_path: Path, suffix: str, damage: str) -> None:
    content = "".join(json.dumps({"text": f"{number} {number**9}"}) + "\n" for number in range(5000)).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESS[suffix](content)
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else content)
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix}: the {suffix} data is damaged or cut off"):
        rows_of(path)


def test_files_that_are_several_compressed_members_are_read_whole(tmp_path: Path) -> None:
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(b'{"text": "a"}\n') + compress(b'{"text": "b"}\n'))
        assert columns_of(path) == [{"text": "a"}, {"text": "b"}]


def test_an_object_that_holds_one_list_of_rows_is_that_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rows = [{"text": "a"}, {"text": "b"}]
    for content in (
        json.dumps({"version": 1, "data": rows}),
        json.dumps({"version": 1, "data": rows}, indent=2),
        json.dumps(rows, indent=1),
    ):
        path.write_text(content, encoding="utf-8")
        assert [(row.name, row.columns) for row in rows_of(path)] == [
            (f"{path}:row 0", {"text": "a"}),
            (f"{path}:row 1", {"text": "b"}),
        ]
    row = {"messages": [{"role": "user", "content": "a"}], "id": 1}
    for indent in (None, 2):
        path.write_text(json.dumps(row, indent=indent), encoding="utf-8")
        assert columns_of(path) == [row]
    path.write_text('{"text": "a"}\n\n{"text": \n{"text": "c"}\n', encoding="utf-8")
    assert [(row.name.rsplit(":")[-1], row.columns) for row in rows_of(path)] == [
        ("1", {"text": "a"}),
        ("3", None),
        ("4", {"text": "c"}),
    ]
    path.write_text(json.dumps({"train": rows, "test": rows}), encoding="utf-8")
    with pytest.raises(DataError, match="several lists of rows, `train`, `test`"):
        rows_of(path)
    path.write_text('{\n "data": [{"text": "a"},\n {"text"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.json:\d: not valid JSON"):
        rows_of(path)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams(tmp_path: Path, kind: str) -> None:
    table = pyarrow.table({"text": [f"{n}" for n in range(1200)], "image": [b"x"] * 1200})
    path = tmp_path / "a.arrow"
    new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)
    rows = rows_of(path)
    assert len(rows) == 1200 and rows[-1] == Row(f"{path}:row 1199", {"text": "1199"})
    assert columns_of(path)[0] == {"text": "0"}
    everything = rows_of(path, Reading(columns={"text": "image"}))
    assert everything[0].columns == {"text": b"x"}
    path.write_bytes(path.read_bytes()[:-40] if kind == "file" else b"no arrow")
    with pytest.raises(DataError, match=r"a\.arrow: cannot be read as Arrow"):
        rows_of(path)


def test_a_folder_is_its_data_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    for name in ("b.jsonl", "a/2.jsonl", "a/10.jsonl.gz", ".hidden.jsonl", "README.md", ".git/x.jsonl"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"text": name}).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    sources = open_sources(str(folder))
    assert [source.name for source in sources] == [
        (folder / name).as_posix() for name in ("a/10.jsonl.gz", "a/2.jsonl", "b.jsonl")
    ]
    assert columns_of(folder) == [{"text": "a/10.jsonl.gz"}, {"text": "a/2.jsonl"}, {"text": "b.jsonl"}]
    assert columns_of(folder / "**" / "*.jsonl") == [{"text": "a/2.jsonl"}, {"text": "b.jsonl"}]
    assert columns_of(folder / "a" / "[0-9].jsonl") == [{"text": "a/2.jsonl"}]
    with pytest.raises(DataError, match=r"README\.md: the suffix \.md is unknown"):
        open_sources(str(folder / "*"))
    literal = folder / "[x].jsonl"
    literal.write_text('{"text": "x"}', encoding="utf-8")
    assert columns_of(literal) == [{"text": "x"}]


def test_a_folder_of_several_splits_is_not_trained_on_as_one(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"holds train-00000\.jsonl and validation\.jsonl; name the files"):
        open_sources(str(tmp_path))
    assert len(open_sources(str(tmp_path / "train*"))) == 2


def test_a_data_set_that_datasets_saved_is_read_in_its_own_order(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list([{"text": str(n)} for n in range(10)])
    whole.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert [columns["text"] for columns in columns_of(tmp_path / "saved")] == [str(n) for n in range(10)]
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"name one of them: .*both/train, .*both/test"):
        open_sources(str(tmp_path / "both"))
    assert len(columns_of(tmp_path / "both" / "train")) == 10


def test_a_columnar_file_is_not_compressed_once_more(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    (tmp_path / "a.txt.gz").write_bytes(b"x")
    with pytest.raises(DataError) as error:
        open_sources([str(tmp_path / "a.parquet.gz"), str(tmp_path / "a.txt.gz")])
    assert "compressed inside; unpack the .gz" in str(error.value) and "suffix .txt.gz is unknown" in str(error.value)


def test_parquet_reads_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"dialog": ["x"], "n": [1]}), path)
    assert [row.columns for row in rows_of(path, Reading(columns={"text": "dialog"}))] == [{"text": "x"}]
    assert columns_of(path) == [{"dialog": "x", "n": 1}]
