"""Formats: recognised by their columns or named, renamed columns, sets of several formats, and what is learnt of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.config import from_mapping
from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening
from meshtune.data.recognise import detect_format
from meshtune.data.section import DataSection
from meshtune.data.sources import open_sources
from meshtune.errors import DataError, RecipeError
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import write_rows


def write(path: Path, *rows: Any) -> str:
    return write_rows(path, rows)


def ready(path: Any, tokenizer: Any, **settings: Any) -> TokenDataset:
    section = from_mapping(DataSection, {"train_path": path, **settings})
    first = path if isinstance(path, str) else path[0]
    return Opening(section, tokenizer, 256, cache_dir=Path(first).parent / "cache").training()


def told(tokenizer: Any, dataset: TokenDataset, row: int = 0) -> tuple[str, str]:
    """The whole text of a row, and what of it is learnt."""
    ids, supervised = dataset[row]
    return tokenizer.decode(ids), tokenizer.decode(ids[supervised])


USER, SAYS = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}
CHAT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
ROWS = {
    "messages": {"messages": [USER, SAYS]},
    "messages as JSON text": {"messages": json.dumps([USER, SAYS])},
    "sharegpt": {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]},
    "sharegpt, OpenAI's keys": {"conversations": [USER, SAYS]},
    "sharegpt, in `messages`": {
        "messages": [{"from": "user", "value": "hello"}, {"from": "Assistant", "value": "yes"}]
    },
    "alpaca": {"instruction": "hello", "input": "", "output": "yes", "text": "### Instruction: hello"},
    "alpaca, no input": {"instruction": "hello", "output": "yes"},
    "prompt_completion": {"prompt": "hello", "completion": "yes"},
    "prompt_completion, messages": {"prompt": [USER], "completion": [SAYS]},
    "prompt_completion, both": {"prompt": [USER], "completion": "yes"},
}


@pytest.mark.parametrize("form", ROWS)
def test_conversations_of_every_format_become_the_same_tokens_and_mask(tmp_path: Path, form: str) -> None:
    """Named and recognised alike."""
    tokenizer, path = kit.byte_level("chatml"), write(tmp_path / "a.jsonl", ROWS[form])
    name = form.split(",")[0].split(" ")[0]
    assert detect_format(open_sources(path), "auto") == name
    for settings in ({}, {"format": name}) if "in `messages`" not in form else ({},):
        assert told(tokenizer, ready(path, tokenizer, **settings)) == (CHAT, "yes<|im_end|>")


def test_system_history_and_tools_of_the_other_formats(tmp_path: Path) -> None:
    tokenizer = kit.byte_level("tools")
    alpaca = {"system": "be", "instruction": "a", "input": "b", "output": "c", "history": [["q", "r"]]}
    text, learnt = told(tokenizer, ready(write(tmp_path / "a.jsonl", alpaca), tokenizer))
    assert learnt == "r<|im_end|>c<|im_end|>"
    assert text.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nq<|im_end|>")
    assert "<|im_start|>user\na\nb<|im_end|>" in text
    turns = [
        {"from": "human", "value": "go"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "one"},
        {"from": "gpt", "value": "done", "weight": 0},
    ]
    called = {"conversations": turns, "system": "be", "tools": '[{"name": "f"}]'}
    text, learnt = told(tokenizer, ready(write(tmp_path / "b.jsonl", called), tokenizer))
    assert learnt == '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert '{"name": "f"}\n<|im_end|>' in text and "<|im_start|>tool\none<|im_end|>" in text


def test_assistant_messages_of_a_prompt_are_not_learnt(tmp_path: Path) -> None:
    tokenizer = kit.byte_level("chatml")
    row = {"prompt": [USER, SAYS, USER], "completion": [{"role": "assistant", "content": "no"}]}
    assert told(tokenizer, ready(write(tmp_path / "a.jsonl", row), tokenizer))[1] == "no<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": "x"}, "not a list of messages"),
        ({"conversations": ["x"]}, "a message is not an object"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "from nobody known"),
        ({"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "x"}]}, "content is not text"),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, "not valid JSON"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "no name"),
        (
            {"conversations": [{"from": "system", "value": "a"}, *ROWS["sharegpt"]["conversations"]], "system": "b"},
            "differ",
        ),
        ({"instruction": "a", "output": " "}, "`output` is empty"),
        ({"instruction": " ", "output": "a"}, "`instruction` is empty"),
        ({"instruction": "a", "output": ["a"]}, "`output` is not a string"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "`history`"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": 3, "completion": "a"}, "`prompt` is neither"),
        ({"prompt": "a", "completion": [USER]}, "no message has the role assistant"),
        ({"input_ids": [1, 2], "labels": [1]}, "not as long as"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "nor its own token"),
        ({"input_ids": [1, 10_000]}, "outside the vocabulary"),
        ({"input_ids": [1, -1]}, "outside the vocabulary"),
        ({"input_ids": [1.5, 2.5]}, "not a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "not a list of integers"),
        ({"input_ids": [1, None]}, "not a list of integers"),
        ({"input_ids": "a b"}, "not a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "neither 0 nor 1"),
        ({"input_ids": []}, "is empty"),
    ],
)
def test_rows_of_a_format_that_cannot_be_used_say_why(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"input_ids": [1, 2]} if "input_ids" in row else next(r for r in ROWS.values() if set(r) & set(row))
    path = write(tmp_path / "a.jsonl", good, row)
    report = ready(path, kit.byte_level("chatml")).report
    assert report.rows_used == 1
    ((found, item),) = report.unusable.items()
    assert reason in found and item.names[0].startswith(f"{path}:2")


def test_without_a_template_a_prompt_and_its_completion_are_one_text(tmp_path: Path) -> None:
    """C08: the token that holds the border belongs to the answer; the end of sequence is learnt, once."""
    tokenizer = kit.merging()
    tokenizer.chat_template = None
    dataset = ready(write(tmp_path / "a.jsonl", {"prompt": "q:", "completion": "yes"}), tokenizer)
    ids, supervised = dataset[0]
    assert ids.tolist() == [0, 5, 3, 4] and np.flatnonzero(supervised).tolist() == [1, 2, 3]
    assert any("no chat template" in line for line in dataset.report.warnings)
    assert any("end-of-sequence" in line for line in dataset.report.warnings)
    tokenizer = kit.byte_level(eos="</s>")
    dataset = ready(write(tmp_path / "b.jsonl", {"prompt": "hello ", "completion": "yes"}), tokenizer)
    assert told(tokenizer, dataset) == ("hello yes</s>", " yes</s>")  # the token holds the border
    dataset = ready(write(tmp_path / "c.jsonl", {"prompt": "hello ", "completion": "yes</s>"}), tokenizer)
    assert told(tokenizer, dataset) == ("hello yes</s>", " yes</s>")  # the token holds the border
    row = {"instruction": "add", "input": "2 + 2", "output": "four"}
    text, learnt = told(tokenizer, ready(write(tmp_path / "d.jsonl", row), tokenizer))
    assert learnt == "four</s>" and "paired with an input" in text
    assert text.endswith("### Instruction:\nadd\n\n### Input:\n2 + 2\n\n### Response:\nfour</s>")
    with pytest.raises(DataError, match="no chat template"):
        ready(write(tmp_path / "e.jsonl", ROWS["messages"]), tokenizer)


def test_rows_of_token_ids_keep_their_mask_and_lose_their_padding(tmp_path: Path) -> None:
    """C23: all per-token columns are cut together."""
    tokenizer = kit.words()
    ids = [0, 1, 7, 4, 2, 8, 4]
    learnt = [0, 0, 0, 0, 0, 1, 1]
    rows = [
        {"input_ids": ids, "labels": [t if m else -100 for t, m in zip(ids, learnt, strict=True)]},
        {"input_ids": ids, "assistant_masks": learnt},
        {"input_ids": ids, "loss_mask": learnt, "completion_mask": [1] * 7},
        {"input_ids": [*ids, 6, 6], "loss_mask": [*learnt, 0, 0], "attention_mask": [1] * 7 + [0, 0]},
        {"input_ids": ids},
    ]
    dataset = ready(write(tmp_path / "a.jsonl", *rows), tokenizer)
    for row in range(4):
        found, supervised = dataset[row]
        assert found.tolist() == ids and supervised.tolist() == [bool(flag) for flag in learnt]
    assert dataset[4][1].all()
    section = from_mapping(DataSection, {"train_path": str(tmp_path / "a.jsonl")})
    cut = Opening(section, tokenizer, 6, cache_dir=tmp_path / "cut").training()
    assert cut.lengths.tolist() == [6] * 5 and cut.supervised_counts.tolist() == [1, 1, 1, 1, 5]


def test_columns_are_called_what_the_recipe_says(tmp_path: Path) -> None:
    """C20; a row that has our own name already keeps it."""
    tokenizer = kit.byte_level("chatml")
    other = {"dialog": [USER, SAYS], "functions": "[]"}
    path = write(tmp_path / "a.jsonl", other, ROWS["messages"])
    dataset = ready(path, tokenizer, columns={"messages": "dialog", "tools": "functions"})
    assert [told(tokenizer, dataset, row)[0] for row in (0, 1)] == [CHAT, CHAT]
    swapped = write(tmp_path / "b.jsonl", {"prompt": "yes", "completion": "hello"})
    dataset = ready(swapped, tokenizer, columns={"prompt": "completion", "completion": "prompt"})
    assert told(tokenizer, dataset)[0] == CHAT
    with pytest.raises(
        DataError, match=r"a\.jsonl: wanted .*`dialogue` \(for `messages`, by data\.columns\).* found `dialog`"
    ):
        ready(write(tmp_path / "a.jsonl", other), tokenizer, columns={"messages": "dialogue"})
    with pytest.raises(DataError, match=r"no row has the column `function` \(for `tools`\)"):
        ready(path, tokenizer, columns={"messages": "dialog", "tools": "function"})


def test_files_and_rows_of_several_conversational_formats_are_one_set(tmp_path: Path) -> None:
    """C19: each row keeps what it has."""
    tokenizer = kit.byte_level("chatml")
    first = write(tmp_path / "a.jsonl", ROWS["messages"], ROWS["sharegpt"], ROWS["prompt_completion"])
    second = write(tmp_path / "b.jsonl", ROWS["alpaca"])
    dataset = ready([first, second], tokenizer)
    assert len(dataset) == 4 and all(told(tokenizer, dataset, row) == (CHAT, "yes<|im_end|>") for row in range(4))
    assert dataset.report.unusable == {}
    assert dataset.report.format == "messages, sharegpt, prompt_completion, alpaca"


def test_sets_that_cannot_be_one_name_both(tmp_path: Path) -> None:
    chat = write(tmp_path / "chat.jsonl", ROWS["messages"])
    text = write(tmp_path / "text.jsonl", {"text": "x"})
    tokens = write(tmp_path / "tokens.jsonl", {"input_ids": [1, 2]})
    for paths, names in (((chat, text), ("messages", "text")), ((tokens, chat), ("tokens", "messages"))):
        with pytest.raises(DataError) as error:
            detect_format(open_sources(list(paths)), "auto")
        for path, name in zip(paths, names, strict=True):
            assert f"`{name}` at {path}:1" in str(error.value)
    both = write(tmp_path / "both.jsonl", {**ROWS["messages"], **ROWS["alpaca"]})
    with pytest.raises(
        DataError, match=r"both\.jsonl:1: has the columns of `messages` .* and of `alpaca` .*data\.format"
    ):
        detect_format(open_sources(both), "auto")
    tokenizer = kit.byte_level("chatml")
    assert told(tokenizer, ready(both, tokenizer, format="alpaca"))[0] == CHAT
    late = write(tmp_path / "late.jsonl", *[ROWS["messages"]] * 100, {**ROWS["messages"], **ROWS["alpaca"]})
    assert list(ready(late, tokenizer).report.unusable) == ["columns of several formats"]


def test_a_named_format_is_the_only_one_that_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS["messages"], ROWS["sharegpt"])
    report = ready(path, kit.byte_level("chatml"), format="messages").report
    assert report.rows_used == 1 and "no column `messages`" in report.unusable
    with pytest.raises(
        DataError, match=r"wanted a column `prompt` and `completion`, found .*`messages`: name it with data.format"
    ):
        ready(write(tmp_path / "b.jsonl", ROWS["messages"]), kit.byte_level("chatml"), format="prompt_completion")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": {"message": "x"}}, "data.columns|columns: names 'message'"),
        ({"format": "text", "columns": {"messages": "x"}}, "no column that `text` reads; those are text"),
        ({"columns": {}}, "columns: is empty"),
        ({"columns": {"text": ""}}, "gives 'text' no name"),
        ({"row_function": "my_rows"}, "row_function: 'my_rows' names no function"),
        ({"max_unusable": 1.5}, "max_unusable"),
    ],
)
def test_settings_without_meaning_or_effect_are_problems(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        from_mapping(DataSection, {"train_path": "a.jsonl", **settings})
