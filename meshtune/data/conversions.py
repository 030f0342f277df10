"""From the conversational formats to the columns of `messages` rows. What a row says of a message stays with it."""

from __future__ import annotations

import json
from typing import Any

from meshtune.data.formats import Message
from meshtune.data.rows import UnusableRow

Columns = dict[str, Any]

_ROLES = {
    "system": "system", "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool", "function": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")


def to_messages(columns: Columns, row_format: str) -> Columns:
    """Return the columns of the `messages` row that says the same. Raises UnusableRow."""
    if row_format == "messages":
        return {**columns, "messages": decoded(columns["messages"])} if "messages" in columns else columns
    return _CONVERSIONS[row_format](columns)


def decoded(value: Any) -> Any:
    """Return a list that a table holds as JSON text, or the value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def strings(columns: Columns, *names: str) -> list[str]:
    """Return text columns, "" for what a row has not. Raises UnusableRow for another type."""
    values = [columns.get(name) or "" for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise UnusableRow(f"`{name}` is not a string", f"found {type(value).__name__}")
    return values


def alpaca_turns(columns: Columns) -> list[tuple[str, str]]:
    """Return (prompt, answer) for each turn of an `alpaca` row, earlier ones first. Raises UnusableRow."""
    instruction, given, output = strings(columns, "instruction", "input", "output")
    prompt = "\n".join(part for part in (instruction, given) if part.strip())
    for name, value in (("instruction", prompt), ("output", output)):
        if not value.strip():
            raise UnusableRow(f"`{name}` is empty" if name in columns else f"no column `{name}`", _found(columns))
    return [*_history(decoded(columns.get("history"))), (prompt, output)]


def prompt_and_completion(columns: Columns) -> tuple[Any, Any]:
    """Return what stands in the two columns, each a string or a list of messages. Raises UnusableRow."""
    for name in ("prompt", "completion"):
        if columns.get(name) is None:
            raise UnusableRow(f"no column `{name}`", _found(columns))
    prompt, completion = columns["prompt"], columns["completion"]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list):
            raise UnusableRow(f"`{name}` is neither text nor a list of messages", f"found {type(value).__name__}")
    if not completion or (isinstance(completion, str) and not completion.strip()):
        raise UnusableRow("`completion` is empty")
    return prompt, completion


def _sharegpt(columns: Columns) -> Columns:
    turns = decoded(
        columns.get("conversations") if columns.get("conversations") is not None else columns.get("messages")
    )
    if turns is None:
        raise UnusableRow("no column `conversations`", _found(columns))
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise UnusableRow("`conversations` is not a list of messages", f"found {found}")
    messages = [_turn(turn, f"message {index}") for index, turn in enumerate(turns)]
    return _with_system(columns, messages)


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise UnusableRow("a message is not an object", where)
    said_by = turn.get("from", turn.get("role"))
    speaker = said_by.lower() if isinstance(said_by, str) else ""
    role = _ROLES.get(speaker)
    if role is None:
        raise UnusableRow("a message is from nobody known", f"{where}: {said_by!r}; known: {', '.join(_ROLES)}")
    kept = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
    value = turn.get("value", turn.get("content"))
    if speaker in _CALLS and isinstance(value, str):
        return {"role": role, "content": "", **kept, "tool_calls": _calls(value, where)}
    return {"role": role, "content": value, **kept}


def _calls(text: str, where: str) -> list[Any]:
    try:
        calls = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnusableRow("a function call is not valid JSON", f"{where}: {error.msg}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UnusableRow("a function call has no name", where)
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _alpaca(columns: Columns) -> Columns:
    messages: list[Message] = []
    for prompt, answer in alpaca_turns(columns):
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return _with_system(columns, messages)


def _history(history: Any) -> list[tuple[str, str]]:
    if history is None or history == "":
        return []
    turns = []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UnusableRow("`history` is not a list of [instruction, answer] pairs of text")
        turns.append((pair[0], pair[1]))
    return turns


def _prompt_completion(columns: Columns) -> Columns:
    """The prompt's own assistant messages are no part of what is learnt."""
    prompt, completion = prompt_and_completion(columns)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    before = [{**m, "weight": 0} if isinstance(m, dict) and m.get("role") == "assistant" else m for m in before]
    rest = {key: value for key, value in columns.items() if key not in ("prompt", "completion")}
    return {**rest, "messages": before + after}


def _with_system(columns: Columns, messages: list[Message]) -> Columns:
    """Put the text of the column `system` first. Raises UnusableRow where the conversation has another one."""
    (system,) = strings(columns, "system")
    first = messages[0] if messages else {}
    if system.strip() and first.get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    elif system.strip() and first.get("content") != system:
        raise UnusableRow("the column `system` and the conversation have different system texts")
    kept = {key: columns[key] for key in ("tools", "train_on_turns") if columns.get(key) is not None}
    return {"messages": messages, **kept}


def _found(columns: Columns) -> str:
    return f"found {', '.join(columns) or 'none'}"


_CONVERSIONS = {"sharegpt": _sharegpt, "alpaca": _alpaca, "prompt_completion": _prompt_completion}
