"""Tool calls in every form that rows have them: C13 and its kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from meshtune.data.chat import ChatEncoder
from meshtune.data.encoding import Encoded
from meshtune.data.rows import Row, RowProblem
from tests.unit import data_tokenizers as kit
from tests.unit.chat_shapes import SHAPES
from tests.unit.test_data_shapes import TOOLS

WITH_TOOLS = [name for name, shape in SHAPES.items() if shape.tools]
ARGUMENTS = {"x": [1, {"y": "s"}]}


def row_of_calls() -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "sum_up", "arguments": ARGUMENTS}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "sum_up", "content": '{"answer": 4}'},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "you?"},
        {"role": "assistant", "content": "fine"},
    ]


def encode(tokenizer: Any, messages: Any, tools: Any = None) -> Encoded | RowProblem:
    (row,) = ChatEncoder(tokenizer).encode([Row("row", {"messages": messages, "tools": tools})])
    return row


def no_content(messages: Any) -> None:
    messages[1]["content"] = None


def absent_content(messages: Any) -> None:
    del messages[1]["content"]


def json_string(messages: Any) -> None:
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)


def without_type(messages: Any) -> None:
    del messages[1]["tool_calls"][0]["type"]


def flat(messages: Any) -> None:
    messages[1]["tool_calls"] = [{"id": "call00001", "name": "sum_up", "arguments": ARGUMENTS}]


def flat_string_no_content(messages: Any) -> None:
    messages[1] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00001", "name": "sum_up", "arguments": json.dumps(ARGUMENTS)}],
    }


def older_function_call(messages: Any) -> None:
    messages[1] = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "sum_up", "arguments": json.dumps(ARGUMENTS)},
    }
    messages[2] = {"role": "function", "name": "sum_up", "content": messages[2]["content"]}


def result_as_object(messages: Any) -> None:
    messages[2]["content"] = {"answer": 4}


FORMS = [no_content, absent_content, json_string, without_type, flat, flat_string_no_content, older_function_call]


@pytest.mark.parametrize("form", [*FORMS, result_as_object], ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_every_form_of_a_call_comes_out_as_the_standard_one(name: str, form: Callable[[Any], None]) -> None:
    tokenizer, messages = SHAPES[name].tokenizer(), row_of_calls()
    standard = encode(tokenizer, copy.deepcopy(messages), TOOLS)
    form(messages)
    given = encode(tokenizer, messages, TOOLS)
    assert isinstance(standard, Encoded) and isinstance(given, Encoded), (standard, given)
    assert given.input_ids.tolist() == standard.input_ids.tolist()
    assert given.supervised.tolist() == standard.supervised.tolist()
    assert "sum_up" in tokenizer.decode(given.input_ids[given.supervised])


def test_ids_names_and_wrappers_that_a_template_asks_for_are_filled_in() -> None:
    """As templates that check the ids of calls and look into the schemas do."""
    tokenizer = kit.byte_level("tools")
    strict = "{% if not c.id or c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>{", strict + "<tool_call>{").replace(
        "{{ t | tojson }}", "{{ t.function.name + ' ' }}"
    )
    messages = row_of_calls()
    del messages[1]["tool_calls"][0]["id"], messages[2]["tool_call_id"]
    row = encode(tokenizer, messages, [TOOLS[0]["function"]])
    assert isinstance(row, Encoded), row
    assert str(tokenizer.decode(row.input_ids)).startswith("<|im_start|>system\nsum_up \n<|im_end|>")


def test_keys_of_other_rows_never_show() -> None:
    """C13: argument types that differ from row to row; no null, no foreign key."""
    tokenizer = kit.byte_level("tools")
    given: list[Any] = [{"x": 1}, {"y": "s"}, {"x": "s"}, {}, None, '{"x": null}']
    rows = []
    for arguments in given:
        messages = row_of_calls()
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        rows.append(Row("row", {"messages": messages[:2]}))
    encoded = [row for row in ChatEncoder(tokenizer).encode(rows) if isinstance(row, Encoded)]
    told = [tokenizer.decode(row.input_ids[row.supervised]) for row in encoded]
    spoken = ['{"x": 1}', '{"y": "s"}', '{"x": "s"}', "{}", "{}", '{"x": null}']
    assert told == [f'<tool_call>{{"name": "sum_up", "arguments": {a}}}</tool_call><|im_end|>' for a in spoken]


@pytest.mark.parametrize("listed", [None, TOOLS])
def test_a_call_that_the_template_passes_over_is_never_lost_in_silence(listed: Any) -> None:
    """Though the name of the function stands in the list of tools."""
    tokenizer = kit.byte_level("chatml")
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    row = encode(tokenizer, row_of_calls(), listed)
    assert isinstance(row, RowProblem) and row.reason == "the chat template leaves a tool call out"
    messages = row_of_calls()
    older_function_call(messages)
    row = encode(tokenizer, messages, listed)
    assert isinstance(row, RowProblem) and row.reason == "the chat template leaves a tool call out"


def test_results_inside_a_turn_that_nothing_delimits_make_the_row_unusable() -> None:
    """No rendering without the results is accepted here, and none up to the call: so it is refused, never learnt."""
    template = (
        "{% if messages[-1].role != 'assistant' or messages[-1].tool_calls %}{{ raise_exception('unfinished') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% elif m.tool_calls %}{% if loop.nextitem.role != 'tool' %}{{ raise_exception('no result') }}{% endif %}"
        "<|im_start|>assistant\n{{ m.tool_calls[0].function.name }} gave {{ messages[loop.index].content }} so "
        "{% elif m.role == 'assistant' %}{% if loop.previtem.role != 'tool' %}<|im_start|>assistant\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = kit.byte_level("chatml")
    tokenizer.chat_template = template
    messages = row_of_calls()
    messages[2]["content"] = "result"
    row = encode(tokenizer, messages)
    assert row == RowProblem("the chat template writes a tool's result into the assistant's turn", "message 2")
