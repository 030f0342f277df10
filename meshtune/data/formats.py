"""Rows of `messages` and of `text`: whether what stands in their columns can be used.

`messages` rows hold an OpenAI-style list of messages, and may hold `tools`; `text` rows hold one string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshtune.data.rows import UnusableRow

Message = dict[str, Any]

_RESULTS = ("tool", "function", "ipython")
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one row, checked, and the tool schemas that its template is given."""

    messages: list[Message]
    tools: list[Any] | None = None


def conversation(columns: dict[str, Any]) -> Conversation:
    """Return the checked conversation of a `messages` row. Raises UnusableRow."""
    messages = columns.get("messages")
    if messages is None:
        raise UnusableRow("no column `messages`", f"found {', '.join(columns) or 'none'}")
    if not isinstance(messages, list) or not messages:
        raise UnusableRow("`messages` is not a list of messages", f"found {_kind(messages)}")
    checked = [_message(message, index) for index, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in checked):
        roles = sorted({message["role"] for message in checked})
        raise UnusableRow("no message has the role assistant", f"roles: {', '.join(roles)}")
    return Conversation(checked, _tools(columns.get("tools")))


def plain_text(columns: dict[str, Any]) -> str:
    """Return the string of a `text` row. Raises UnusableRow."""
    text = columns.get("text")
    if text is None:
        raise UnusableRow("no column `text`", f"found {', '.join(columns) or 'none'}")
    if not isinstance(text, str):
        raise UnusableRow("`text` is not a string", f"found {_kind(text)}")
    if not text.strip():
        raise UnusableRow("`text` is empty")
    return text


def message_text(message: Message) -> str:
    """Return the text of a message's content, its parts joined; "" where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _message(message: Any, index: int) -> Message:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise UnusableRow("a message is not an object", f"{where} is {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UnusableRow("a message has no role", f"{where} has {', '.join(map(str, message)) or 'no key'}")
    if message.get("tool_calls") is not None and not isinstance(message["tool_calls"], list):
        raise UnusableRow("`tool_calls` is not a list", f"{where}: {_kind(message['tool_calls'])}")
    if message.get("weight") not in (None, 0, 1):
        raise UnusableRow("a message's weight is neither 0 nor 1", f"{where}: {message['weight']!r}")
    if role in _RESULTS:
        message = _with_text(message)
    _check_content(message, where)
    return message


def _with_text(result: Message) -> Message:
    """Return a tool's result as text: an object, a number or a list that is no list of parts is written as JSON."""
    content = result.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if content is None or isinstance(content, str) or is_parts:
        return result
    return {**result, "content": json.dumps(content, ensure_ascii=False)}


def _check_content(message: Message, where: str) -> None:
    content = message.get("content")
    if content is None:
        calls = message.get("tool_calls") or message.get("function_call")
        if not calls and not any(message.get(key) for key in _REASONING):
            raise UnusableRow("a message has no content", f"{where} ({message['role']})")
    elif isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UnusableRow('a content part is not {"type": "text", "text": ...}', where)
    elif not isinstance(content, str):
        raise UnusableRow("a message's content is not text", f"{where}: {_kind(content)}")


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):  # a data set's way to keep schemas of different shapes in one column
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise UnusableRow("`tools` is not valid JSON", error.msg) from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnusableRow("`tools` is not a list of JSON schemas", f"found {_kind(tools)}")
    return tools or None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return "an empty list" if value == [] else names.get(type(value), "a number")
