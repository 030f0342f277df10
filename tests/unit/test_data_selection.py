"""Which turns are learnt, and which words of them: C15, and reasoning of earlier turns, C07."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.config import from_mapping
from meshtune.data.chat import ChatEncoder
from meshtune.data.encoders import encoder
from meshtune.data.encoding import Encoded
from meshtune.data.opening import Opening
from meshtune.data.rows import Row, RowProblem
from meshtune.data.section import DataSection
from meshtune.errors import DataError, RecipeError
from tests.unit import data_tokenizers as kit
from tests.unit.chat_shapes import SHAPES
from tests.unit.test_data_shapes import TOOLS


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def encode(
    tokenizer: Any, messages: Any, tools: Any = None, flags: Any = None, **settings: Any
) -> Encoded | RowProblem:
    columns = {"messages": messages, "tools": tools} | ({} if flags is None else {"train_on_turns": flags})
    (row,) = ChatEncoder(tokenizer, **settings).encode([Row("row", columns)])
    return row


def learnt(tokenizer: Any, messages: Any, tools: Any = None, flags: Any = None, **settings: Any) -> str:
    row = encode(tokenizer, messages, tools, flags, **settings)
    assert isinstance(row, Encoded), row
    return str(tokenizer.decode(row.input_ids[row.supervised]))


def test_only_the_last_assistant_turn_by_the_recipe_and_by_flags() -> None:
    toy, messages = kit.words(), chat("hi", "ok", "hi", "ok")
    for settings in ({"train_on": "last"}, {"flags": [0, 1]}, {"flags": [False, True]}):
        row = encode(toy, messages, **settings)
        assert isinstance(row, Encoded)
        assert np.flatnonzero(row.supervised).tolist() == [11, 12]
    marked = copy.deepcopy(messages)
    marked[1]["train"] = False
    row = encode(toy, marked)
    assert isinstance(row, Encoded) and np.flatnonzero(row.supervised).tolist() == [11, 12]


def test_rules_are_combined_by_taking_away() -> None:
    toy, messages = kit.words(), chat("hi", "ok", "hi", "ok", "hi", "ok")
    messages[1]["weight"] = 0
    row = encode(toy, messages, flags=[1, 1, 0])
    assert isinstance(row, Encoded) and np.flatnonzero(row.supervised).tolist() == [11, 12]
    assert encode(toy, messages, flags=[1, 1, 0], train_on="last") == RowProblem("no supervised token")


def test_flags_that_do_not_fit_are_told_with_both_numbers() -> None:
    problem = encode(kit.words(), chat("hi", "ok", "hi", "ok"), flags=[1, 0, 1])
    assert isinstance(problem, RowProblem) and problem.detail == "3 flags for 2 of them"
    problem = encode(kit.words(), chat("hi", "ok"), flags=["yes"])
    assert isinstance(problem, RowProblem) and "0 and 1" in problem.reason
    assert encode(kit.words(), chat("hi", "ok"), flags=[0]) == RowProblem("no supervised token")
    messages = chat("hi", "ok")
    messages[1]["train"] = "no"
    problem = encode(kit.words(), messages)
    assert isinstance(problem, RowProblem) and "neither true nor false" in problem.reason


def test_the_last_turn_is_the_last_assistant_message_though_a_user_speaks_after_it() -> None:
    tokenizer = SHAPES["chatml"].tokenizer()
    assert learnt(tokenizer, chat("hello", "yes", "you?", "fine", "why"), train_on="last") == "fine<|im_end|>"


@pytest.mark.parametrize("template", ["chatml", "llama3", "parts", "mistral"])
def test_words_with_weight_0_are_read_and_not_learnt(template: str) -> None:
    """In templates that take parts, and in those that want one string."""
    tokenizer = kit.byte_level(template, eos="</s>")
    messages = chat("hello", "", "you?", "so")
    messages[1]["content"] = [
        {"type": "text", "text": "the answer", "weight": 1},
        {"type": "text", "text": " user four", "weight": 0},
        {"type": "text", "text": " is fine"},
    ]
    row = encode(tokenizer, messages)
    assert isinstance(row, Encoded)
    assert "the answer user four is fine" in tokenizer.decode(row.input_ids)
    told = tokenizer.decode(row.input_ids[row.supervised])
    assert "the answer is fine" in told and "user four" not in told and "so" in told
    messages[1]["content"][1]["weight"] = 2
    problem = encode(tokenizer, messages)
    assert isinstance(problem, RowProblem) and "part's weight" in problem.reason


def test_flags_are_no_part_of_what_the_template_sees() -> None:
    tokenizer = kit.byte_level("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ m | length }}"
    )
    messages = chat("a", "yes", "b", "so")
    for message in messages[1::2]:
        message |= {"weight": 1, "train": True}
    assert learnt(tokenizer, messages) == "yes2<|im_end|>so2<|im_end|>"


def thinking(*pairs: tuple[str, str], field: str | None = "reasoning_content") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, (why, text) in enumerate(pairs):
        messages.append({"role": "user", "content": f"question {number}"})
        inline = {"content": f"<think>\n{why}\n</think>\n\n{text}"}
        messages.append({"role": "assistant", **({"content": text, field: why} if field else inline)})
    return messages


TWO = (("why not", "yes"), ("2 + 2", "four"))

KEPT = {
    "qwen3": "<think>\nwhy not\n</think>\n\nyes<|im_end|><think>\n2 + 2\n</think>\n\nfour<|im_end|>",
    "glm4": "\n<think>why not</think>\nyes\n<think>2 + 2</think>\nfour",
    "harmony": "<|channel|>analysis<|message|>why not<|end|><|start|>assistant<|channel|>final<|message|>yes<|end|>"
    "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
    "nemotron": "why not\n</think>\nyes<|im_end|>2 + 2\n</think>\nfour<|im_end|>",
    "deepseek-r1": "why not\n</think>\n\nyes<｜end▁of▁sentence｜>2 + 2\n</think>\n\nfour<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", None])
def test_reasoning_of_all_turns_is_kept_on_request(name: str, field: str | None) -> None:
    """C07: both reasoning strings occur in the text, as the template shows them in a last turn, and are learnt."""
    if (name, field) == ("harmony", None):
        pytest.skip("harmony shows words in <think> as any others, so nothing is left out")
    tokenizer = SHAPES[name].tokenizer()
    row = encode(tokenizer, thinking(*TWO, field=field), reasoning="keep")
    assert isinstance(row, Encoded), row
    assert tokenizer.decode(row.input_ids[row.supervised]) == KEPT[name]
    text = tokenizer.decode(row.input_ids)
    assert text.count("why not") == 1 and text.count("2 + 2") == 1 and text.index("why not") < text.index("question 1")


def test_reasoning_follows_a_prompt_that_opens_it_where_no_turn_shows_it() -> None:
    tokenizer = SHAPES["deepseek-r1"].tokenizer()
    row = encode(tokenizer, thinking(*TWO), reasoning="keep")
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.input_ids) == (
        "<s><｜User｜>question 0<｜Assistant｜><think>\nwhy not\n</think>\n\nyes<｜end▁of▁sentence｜>"
        "<｜User｜>question 1<｜Assistant｜><think>\n2 + 2\n</think>\n\nfour<｜end▁of▁sentence｜>"
    )


def test_kept_text_is_what_the_model_has_read_and_written_turn_by_turn() -> None:
    """The prompt before each turn is what inference would give, had it kept the earlier reasoning."""
    tokenizer = SHAPES["qwen3"].tokenizer()
    row = encode(tokenizer, thinking(*TWO), reasoning="keep")
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n<think>\nwhy not\n</think>\n\nyes<|im_end|>\n"
        "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n<think>\n2 + 2\n</think>\n\nfour<|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["qwen3", "glm4", "harmony"])
def test_reasoning_of_calls_in_earlier_exchanges_is_kept(name: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    call = {"id": "a", "type": "function", "function": {"name": "sum_up", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "sum_up", "content": "result"},
        {"role": "assistant", "content": "four", "reasoning_content": "I see"},
        *chat("you?", "fine"),
    ]
    plain, kept = learnt(tokenizer, messages, TOOLS), learnt(tokenizer, messages, TOOLS, reasoning="keep")
    assert "call it" not in plain and "I see" not in plain
    assert kept.index("call it") < kept.index("sum_up") < kept.index("I see") < kept.index("four")
    assert "result" not in kept and "hello" not in kept and kept.count("sum_up") == 1
    for token in ("<|call|>", "<|end|>", "<|return|>", "<|im_end|>"):
        assert kept.count(token) - plain.count(token) == (2 if (name, token) == ("harmony", "<|end|>") else 0)


def test_words_with_weight_0_stay_unlearnt_beside_reasoning_that_is_put_back() -> None:
    tokenizer, messages = SHAPES["qwen3"].tokenizer(), thinking(*TWO)
    messages[1]["content"] = [{"type": "text", "text": "yes"}, {"type": "text", "text": " ok", "weight": 0}]
    assert learnt(tokenizer, messages, reasoning="keep").startswith("<think>\nwhy not\n</think>\n\nyes<|im_end|>")
    messages[1]["content"] = [{"type": "text", "text": "yes", "weight": 0}, {"type": "text", "text": " ok"}]
    assert learnt(tokenizer, messages, reasoning="keep").startswith("<think>\nwhy not\n</think>\n\n ok<|im_end|>")


@pytest.mark.parametrize("name", SHAPES)
def test_keeping_reasoning_changes_nothing_where_there_is_none(name: str) -> None:
    tokenizer, messages = SHAPES[name].tokenizer(), chat("hello", "yes", "you?", "fine")
    one, other = encode(tokenizer, messages), encode(tokenizer, messages, reasoning="keep")
    assert isinstance(one, Encoded) and isinstance(other, Encoded)
    assert one.input_ids.tolist() == other.input_ids.tolist() and one.supervised.tolist() == other.supervised.tolist()


@pytest.mark.parametrize("name", ["chatml", "zephyr", "phi3"])
def test_templates_that_know_no_reasoning_show_it_as_it_stands_or_inline(name: str) -> None:
    kept = learnt(SHAPES[name].tokenizer(), thinking(*TWO, field=None), reasoning="keep")
    assert kept == learnt(SHAPES[name].tokenizer(), thinking(*TWO, field=None))
    assert kept.count("<think>") == 2
    assert learnt(SHAPES[name].tokenizer(), thinking(*TWO), reasoning="keep") == kept


def test_reasoning_that_no_rendering_shows_is_refused_by_name() -> None:
    """This template cuts it off even in a last turn, and its generation prompt does not open it."""
    tokenizer = kit.byte_level("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'].split('</think>')[-1]")
    problem = encode(tokenizer, thinking(*TWO), reasoning="keep")
    assert isinstance(problem, RowProblem)
    assert "no place for the reasoning" in problem.reason and problem.detail == "message 1"


def test_reasoning_that_the_template_leaves_out_is_counted() -> None:
    encoder = ChatEncoder(SHAPES["qwen3"].tokenizer())
    encoder.encode([Row("row", {"messages": thinking(*TWO)})])
    assert "reasoning of 1 turns" in encoder.warnings()[0] and "reasoning: keep" in encoder.warnings()[0]
    encoder.encode([Row("row", {"messages": chat("hello", "yes")})])
    assert "reasoning of 1 turns" in encoder.warnings()[0]


def test_the_recipe_hands_its_settings_to_the_encoder() -> None:
    section = from_mapping(DataSection, {"train_path": "a.jsonl", "train_on": "last", "reasoning": "keep"})
    tokenizer = SHAPES["qwen3"].tokenizer()
    (row,) = encoder(section, "messages", tokenizer).encode([Row("row", {"messages": thinking(*TWO, ("x", "fine"))})])
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.input_ids[row.supervised]) == "<think>\nx\n</think>\n\nfine<|im_end|>"
    assert "why not" in tokenizer.decode(row.input_ids)


@pytest.mark.parametrize("setting", [{"train_on": "last"}, {"reasoning": "keep"}])
def test_settings_of_turns_are_refused_where_no_set_has_any(setting: dict[str, str], tmp_path: Path) -> None:
    """By the recipe where it names the format, else when the first rows are known."""
    (key,) = setting
    with pytest.raises(RecipeError, match=f"{key}.*format `text`"):
        from_mapping(DataSection, {"train_path": "a.jsonl", "format": "text", **setting})
    text, chats = tmp_path / "text.jsonl", tmp_path / "chat.jsonl"
    text.write_text('{"text": "hi ok"}\n', encoding="utf-8")
    chats.write_text(json.dumps({"messages": chat("hi", "ok")}) + "\n", encoding="utf-8")

    def opening(**paths: Any) -> Opening:
        section = from_mapping(DataSection, {**setting, **{name: _written(path) for name, path in paths.items()}})
        return Opening(section, kit.words(), 16, 60, tmp_path / "cache")

    none = [
        {"train_path": text},
        {"train_path": [{"path": text, "weight": 1}, {"path": text, "weight": 2}], "validation_path": text},
        {"train_path": text, "validation_size": 1},
    ]
    for paths in none:
        for look in (Opening.training, Opening.preview):
            with pytest.raises(DataError, match=rf"data\.{key} has no effect: rows of `text` have no assistant turns"):
                look(opening(**paths))
    some = [
        {"train_path": chats, "validation_path": text},
        {"train_path": text, "validation_path": {"talk": chats, "prose": text}},
        {"train_path": [{"path": text, "weight": 1}, {"path": chats, "weight": 2}], "validation_path": text},
    ]
    for paths in some:
        one = opening(**paths)
        assert one.preview() and one.training().report.rows_used
        assert all(data.report.rows_used for data in one.validation().values())


def test_settings_of_turns_change_the_sets_that_have_turns(tmp_path: Path) -> None:
    """Plain texts for validation are learnt in full beside conversations of which the last turn is."""
    text, chats = tmp_path / "text.jsonl", tmp_path / "chat.jsonl"
    text.write_text('{"text": "hi ok hi"}\n', encoding="utf-8")
    chats.write_text(json.dumps({"messages": chat("hi", "ok", "hi", "ok")}) + "\n", encoding="utf-8")
    section = from_mapping(DataSection, {"train_path": str(chats), "validation_path": str(text), "train_on": "last"})
    one = Opening(section, kit.words(), 16, 60, tmp_path / "cache")
    training, validation = one.training(), one.validation()[""]
    assert training.report.supervised_tokens == 2
    assert validation.report.supervised_tokens == validation.report.tokens - 1 == 3


def _written(paths: Any) -> Any:
    """Paths as a recipe has them."""
    if isinstance(paths, list):
        return [_written(item) for item in paths]
    if isinstance(paths, dict):
        return {name: _written(item) for name, item in paths.items()}
    return str(paths) if isinstance(paths, Path) else paths
