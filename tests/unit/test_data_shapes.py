"""What is learnt under templates of every known shape, over conversations drawn at random."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from meshtune.data.chat import ChatEncoder
from meshtune.data.encoding import Encoded
from meshtune.data.rows import Row, RowProblem
from tests.unit.chat_shapes import SHAPES, Shape

WORDS = [
    "yes",
    "ok",
    "the answer is four",
    "é🙂 漢字",
    "user",
    "assistant",
    "Assistant:",
    "2 + 2",
    "x",
    "so\n\nfine",
    "{}",
]
TOOLS = [{"type": "function", "function": {"name": "sum_up", "parameters": {"type": "object", "properties": {}}}}]


def said(rng: random.Random, shape: Shape) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 1, 2, 4])))
    return text if shape.trims else rng.choice(["", "", "", " ", "\n"]) + text + rng.choice(["", "", "", " ", "\n\n"])


def exchange(rng: random.Random, shape: Shape, tools: bool) -> list[dict[str, Any]]:
    """One question and its answer, perhaps with calls on the way."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": said(rng, shape)}]
    while tools and rng.random() < 0.5:
        names = [f"call{i}" for i in range(rng.randint(1, shape.calls))]
        arguments = [{"x": rng.choice([1, "s", None, [1, {"y": "z"}]])} for _ in names]
        calls = [
            {
                "id": n,
                "type": "function",
                "function": {"name": "sum_up", "arguments": json.dumps(a) if rng.random() < 0.5 else a},
            }
            for n, a in zip(names, arguments, strict=True)
        ]
        beside = rng.choice(WORDS) if shape.text_beside_calls and rng.random() < 0.5 else ""
        messages.append(thought(rng, shape, {"role": "assistant", "content": beside, "tool_calls": calls}))
        messages += [{"role": "tool", "tool_call_id": n, "name": "sum_up", "content": said(rng, shape)} for n in names]
    return [*messages, thought(rng, shape, {"role": "assistant", "content": said(rng, shape)})]


def thought(rng: random.Random, shape: Shape, message: dict[str, Any]) -> dict[str, Any]:
    if shape.reasoning and rng.random() < 0.5:
        return {**message, "reasoning_content": rng.choice(["why not", "2 + 2\nis four"])}
    return message


def conversation(rng: random.Random, shape: Shape) -> tuple[list[dict[str, Any]], list[Any] | None]:
    tools = shape.tools and rng.random() < 0.6
    messages = [m for _ in range(rng.choice([1, 2, 3])) for m in exchange(rng, shape, tools)]
    if shape.system and rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": said(rng, shape)})
    return messages, TOOLS if tools else None


def as_the_template_wants(shape: Shape, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with arguments as the shape's own template takes them."""
    strings = "c.function.arguments +" in shape.source
    changed = json.loads(json.dumps(messages))
    for call in (call for message in changed for call in message.get("tool_calls", ())):
        given = call["function"]["arguments"]
        value = json.loads(given) if isinstance(given, str) else given
        call["function"]["arguments"] = json.dumps(value) if strings else value
    return changed


def assert_learnt(shape: Shape, encoded: Encoded | RowProblem, messages: Any, tools: Any) -> None:
    text, flags = shape.expected(as_the_template_wants(shape, messages), tools)
    assert isinstance(encoded, Encoded), (encoded, text)
    tokenizer = shape.tokenizer()
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded.input_ids.tolist() == tokens["input_ids"]
    expected = [any(flags[start:end]) for start, end in tokens["offset_mapping"]]
    wanted = tokenizer.decode([t for t, flag in zip(tokens["input_ids"], expected, strict=True) if flag])
    assert tokenizer.decode(encoded.input_ids[encoded.supervised]) == wanted, text
    assert encoded.supervised.tolist() == expected


@pytest.mark.parametrize("name", SHAPES)
def test_exactly_what_the_model_has_to_say_is_learnt(name: str) -> None:
    """C01, C02, C06, C07, C13: one encoder over many rows, so that its short cuts are at work."""
    shape, rng = SHAPES[name], random.Random(name)
    rows = [conversation(rng, shape) for _ in range(60)]
    encoder = ChatEncoder(shape.tokenizer())
    encoded = encoder.encode([Row(f"row {i}", {"messages": m, "tools": t}) for i, (m, t) in enumerate(rows)])
    for result, (messages, tools) in zip(encoded, rows, strict=True):
        assert_learnt(shape, result, messages, tools)
