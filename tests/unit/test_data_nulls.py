"""C13: what a column adds to a row is not read, what a row says is: calls and tools of all shapes through every kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshtune.data.chat import ChatEncoder
from meshtune.data.encoders import ConversationEncoder
from meshtune.data.encoding import Encoded
from meshtune.data.readers_arrow import read_dataset, read_stream
from meshtune.data.rows import Row
from meshtune.data.sources import open_sources
from tests.unit.chat_shapes import SHAPES
from tests.unit.data_ranks import write_rows

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(*calls: Any, tools: Any = (), **fields: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": "", **fields, "tool_calls": list(calls)}
    return {"messages": [USER, turn, {"role": "tool", "content": "4", "name": "f"}, ANSWER], "tools": list(tools)}


ROWS = [
    calling(call("f", {"x": 1}), tools=[tool("f", x={"type": "integer"})], content=None),
    calling(
        call("g", {"y": "s", "z": [1, 2], "o": {"k": True}}), tools=[tool("g", y={"type": "string", "enum": ["s"]})]
    ),
    calling(call("h", {}), tools=[tool("h")]),
    {"messages": [USER, {**ANSWER, "reasoning_content": "two and two"}]},
    {"messages": [USER, ANSWER]},
]


def written(folder: Path, kind: str, rows: list[Any]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        write_rows(path, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def read(path: Path) -> list[Row]:
    return [row for source in open_sources(str(path)) for row in source.rows()]


def columns(path: Path) -> list[Any]:
    return [row.columns for row in read(path)]


def texts(shape: str, rows: list[Row]) -> list[str]:
    tokenizer = SHAPES[shape].tokenizer()
    encoded = ConversationEncoder(ChatEncoder(tokenizer), "messages", any_other=True).encode(rows)
    assert all(isinstance(row, Encoded) for row in encoded), encoded
    return [str(tokenizer.decode(row.input_ids)) for row in encoded if isinstance(row, Encoded)]


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape.tools])
def test_rows_are_the_same_text_from_every_kind_of_file(tmp_path: Path, shape: str) -> None:
    wanted = texts(shape, read(written(tmp_path, "jsonl", ROWS)))
    assert not any(word in text for text in wanted for word in ("null", "None", '"z": [], '))
    for kind in ("parquet", "arrow", "saved"):
        assert texts(shape, read(written(tmp_path, kind, ROWS))) == wanted


def test_a_null_that_the_user_wrote_is_read(tmp_path: Path) -> None:
    """In a call's arguments as in a tool's schema."""
    row = calling(call("f", {"x": None, "y": [None, 1]}), tools=[tool("f", x={"default": None})])
    (text,) = texts("qwen3", read(written(tmp_path, "jsonl", [row])))
    assert '"arguments": {"x": null, "y": [null, 1]}' in text and '"default": null' in text


def test_maps_are_objects_that_say_their_own_keys(tmp_path: Path) -> None:
    """Arguments as Arrow's map: no pairs in the text, an empty one is {}, and a null in it was written."""
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.string()}))
    arguments = [[("x", {"a": 1}), ("n", None)], [("y", {"b": "s"})], [], None]
    table = pyarrow.table({"arguments": pyarrow.array(arguments, kind), "maps": [[1, None], [], None, [2]]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert columns(tmp_path / "rows.parquet") == [
        {"arguments": {"x": {"a": 1}, "n": None}, "maps": [1, None]},
        {"arguments": {"y": {"b": "s"}}, "maps": []},
        {"arguments": {}},
        {"maps": [2]},
    ]


def test_fields_of_json_are_values_with_the_nulls_that_were_written(tmp_path: Path) -> None:
    """What `datasets` makes of arguments and schemas of several types; on disk, from the hub, and streamed."""
    datasets = pytest.importorskip("datasets")
    rows = [
        calling(call("f", {"x": 1, "n": None}), tools=[tool("f", x={"type": "integer", "enum": [1, "one"]})]),
        calling(call("f", {"x": "s", "y": {"k": [1, "a"]}}), tools=[tool("f", x={"type": "string", "enum": ["s"]})]),
    ]
    source = written(tmp_path, "jsonl", rows)
    loaded = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "hf"))
    assert "Json" in str(loaded.features), "else this tests nothing"
    loaded.to_parquet(str(tmp_path / "json.parquet"))
    loaded.save_to_disk(str(tmp_path / "json"))
    wanted = texts("qwen3", read(source))
    assert '{"x": 1, "n": null}' in wanted[0] and '"enum": [1, "one"]' in wanted[0]
    for found in (
        read(tmp_path / "json.parquet"),
        read(tmp_path / "json"),
        list(read_dataset(loaded, "org/name")),
        list(read_stream(loaded.to_iterable_dataset(), "org/name")),
    ):
        assert texts("qwen3", found) == wanted


def test_a_loaded_data_set_keeps_its_order_and_its_choice_of_rows() -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_list([{"text": str(n), "other": n} for n in range(1100)]).select(range(1099, -1, -1))
    found = list(read_dataset(loaded, "org/name", ["text"]))
    assert (
        len(found) == 1100
        and found[0] == Row("org/name:row 0", {"text": "1099"})
        and found[-1].name.endswith("row 1099")
    )


@pytest.mark.parametrize("nothing", [None, []])
def test_messages_that_say_they_call_nothing_call_nothing(nothing: Any) -> None:
    """As OpenAI's own objects are written; a template that asks `'tool_calls' in message` must not see a call."""
    shape = SHAPES["chatml"]
    tokenizer = shape.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- for m in messages -%}",
        "{%- for m in messages -%}{%- if 'tool_calls' in m or 'function_call' in m -%}"
        "{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call') }}{%- endif -%}{%- endif -%}",
    )
    said = [{**USER, "tool_calls": nothing}, {**ANSWER, "tool_calls": nothing, "function_call": None}]
    (found,) = ChatEncoder(tokenizer).encode([Row("row", {"messages": said})])
    (wanted,) = ChatEncoder(tokenizer).encode([Row("row", {"messages": [USER, ANSWER]})])
    assert isinstance(found, Encoded) and isinstance(wanted, Encoded), found
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    assert found.supervised.tolist() == wanted.supervised.tolist()
