"""The equal shapes of a conversation that templates differ in: one of them is what a template takes.

Rows and templates differ in whether arguments of a call are objects or JSON strings, whether a call and a tool's schema
stand inside `function`, whether a turn that only calls has content, and whether content is a string or a list of parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from meshtune.data.formats import Conversation, Message, message_text

_CALLS = ("tool_calls", "function_call")


def variants(given: Conversation) -> Iterator[Conversation]:
    """Yield the conversation in each shape, all different, the one nearest to the row first."""
    standard = Conversation(list(_standard(given.messages)), given.tools)
    seen: list[Conversation] = []
    for shape in _of_calls(standard):
        if shape not in seen:
            seen.append(shape)
            yield shape
    for change in (message_text, _as_parts):
        for shape in tuple(seen):
            changed = [{**m, "content": change(m)} if m.get("content") is not None else m for m in shape.messages]
            other = Conversation(changed, shape.tools)
            if other not in seen:
                seen.append(other)
                yield other


def _of_calls(standard: Conversation) -> Iterator[Conversation]:
    yield standard
    if all("tool_calls" not in message and message.get("content") is not None for message in standard.messages):
        return
    full = _filled_in(standard)
    for conversation in (standard, full):
        for messages in (conversation.messages, _with_content(conversation.messages)):
            yield Conversation(messages, conversation.tools)
            yield Conversation([_with_arguments(message, _as_json) for message in messages], conversation.tools)


def _standard(messages: list[Message]) -> Iterator[Message]:
    """Yield messages whose calls are `{"type": "function", "function": {"name", "arguments"}}`, arguments an object.

    The older `function_call`, answered by the role `function`, becomes a call and its result. A list of no calls, which some
    write on every message, is none: templates ask whether there is one.
    """
    older = any(message.get("function_call") for message in messages)
    for message in messages:
        if any(key in message and not message[key] for key in _CALLS):
            message = {k: v for k, v in message.items() if v or k not in _CALLS}
        if older and message.get("function_call"):
            message = {k: v for k, v in message.items() if k != "function_call"} | {
                "tool_calls": [{"function": message["function_call"]}]
            }
        elif older and message["role"] == "function":
            message = {**message, "role": "tool"}
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [_standard_call(call) for call in message["tool_calls"]]}
            message = _with_arguments(message, _as_object)
        yield message


def _standard_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if function is None and "name" in call:
        function = {key: call[key] for key in ("name", "arguments", "parameters") if key in call}
        call = {key: value for key, value in call.items() if key not in function}
    if not isinstance(function, dict):
        return call
    if function.get("arguments") is None:
        function = {**function, "arguments": function.get("parameters") or {}}
    return {**call, "type": call.get("type") or "function", "function": function}


def _with_content(messages: list[Message]) -> list[Message]:
    return [{**message, "content": ""} if message.get("content") is None else message for message in messages]


def _filled_in(standard: Conversation) -> Conversation:
    """Return the conversation with what some templates ask for: an id for each call, its result's id and name, and
    schemas inside `function`.
    """
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []
    number = 0
    for message in standard.messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                if isinstance(call, dict):
                    number += 1
                    call = {**call, "id": call.get("id") or f"call{number:05d}"}
                    waiting.append((call["id"], (call.get("function") or {}).get("name", "")))
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            asked = message.get("tool_call_id")
            answered = next((item for item in waiting if item[0] == asked), waiting[0])
            waiting.remove(answered)
            message = {**message, "tool_call_id": answered[0], "name": message.get("name") or answered[1]}
        messages.append(message)
    tools = standard.tools and [_wrapped(tool) for tool in standard.tools]
    return Conversation(messages, tools)


def _wrapped(tool: Any) -> Any:
    if not isinstance(tool, dict) or "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _as_parts(message: Message) -> list[dict[str, str]]:
    return [{"type": "text", "text": message_text(message)}]


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": change(function["arguments"])}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except json.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
