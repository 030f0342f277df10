"""Which of a row's assistant turns are learnt: by the recipe, by flags on messages, by a column of flags.

Each of them can only take away: a turn is learnt if nothing says otherwise. `weight: 0` and `train: false` stand on
messages, `weight: 0` on a content part too; the column `train_on_turns` has one flag for each assistant message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshtune.data.affixes import common_prefix, common_suffix
from meshtune.data.formats import Conversation, Message, message_text
from meshtune.data.rendered import Rendered, Span
from meshtune.data.rows import UnusableRow

TrainOn = Literal["all", "last"]

_FLAGS = ("weight", "train")


@dataclass(frozen=True, slots=True)
class Selection:
    """The indices of the messages to learn, and the parts of their content that are left out: (message, part)."""

    messages: frozenset[int]
    parts_left_out: tuple[tuple[int, int], ...] = ()


def select(given: Conversation, columns: dict[str, Any], train_on: TrainOn) -> tuple[Conversation, Selection]:
    """Return the conversation without flags, for the template, and what they say. Raises UnusableRow for a flag that
    is none, and for another number of flags than of turns.
    """
    turns = [index for index, message in enumerate(given.messages) if message["role"] == "assistant"]
    learnt = {index for index in turns if _says_yes(given.messages[index], index)}
    flags = columns.get("train_on_turns")
    if flags is not None:
        learnt &= {index for index, flag in zip(turns, _checked(flags, len(turns)), strict=True) if flag}
    if train_on == "last":
        learnt &= {turns[-1]}
    parts = tuple(part for index in sorted(learnt) for part in _parts_left_out(given.messages[index], index))
    if any(_has_flags(message) for message in given.messages):
        given = Conversation([_without_flags(message) for message in given.messages], given.tools)
    return given, Selection(frozenset(learnt), parts)


def part_span(rendered: Rendered, given: Conversation, index: int, part: int) -> Span:
    """Return [start, end) of one content part in the rendered text: what a rendering with a mark in its place does
    not share. Raises UnusableRow where the template does not show the part by itself.
    """
    mark, text = rendered.marks[0], rendered.text
    parts = [dict(item) for item in given.messages[index]["content"]]
    parts[part]["text"] = mark
    message = {**rendered.messages[index], "content": parts}
    if isinstance(rendered.messages[index].get("content"), str):
        message["content"] = message_text(message)
    other = rendered.marked({index: message})
    if other is None or mark not in other:
        raise UnusableRow("the chat template does not show a content part that has a weight", f"message {index}")
    start = common_prefix(text, other)
    return start, len(text) - common_suffix(text[start:], other[start:])


def without(spans: list[Span], left_out: list[Span]) -> list[Span]:
    """Return sorted, disjoint spans without what stands in any of `left_out`."""
    for start, end in left_out:
        pieces = [piece for a, b in spans for piece in ((a, min(b, start)), (max(a, end), b))]
        spans = [(a, b) for a, b in pieces if a < b]
    return spans


def _says_yes(message: Message, index: int) -> bool:
    train = message.get("train")
    if train not in (None, True, False):
        raise UnusableRow("a message's `train` is neither true nor false", f"message {index}: {train!r}")
    return message.get("weight") != 0 and train not in (0, False)


def _checked(flags: Any, turns: int) -> list[Any]:
    if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
        raise UnusableRow("`train_on_turns` is not a list of 0 and 1", f"found {flags!r}")
    if len(flags) != turns:
        raise UnusableRow(
            "`train_on_turns` does not fit the assistant messages", f"{len(flags)} flags for {turns} of them"
        )
    return flags


def _parts_left_out(message: Message, index: int) -> Iterator[tuple[int, int]]:
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        weight = part.get("weight")
        if weight not in (None, 0, 1):
            raise UnusableRow("a content part's weight is neither 0 nor 1", f"message {index}: {weight!r}")
        if weight == 0 and part["text"]:
            yield index, number


def _has_flags(message: Message) -> bool:
    content = message.get("content")
    return any(flag in message for flag in _FLAGS) or (
        isinstance(content, list) and any("weight" in part for part in content)
    )


def _without_flags(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key not in _FLAGS}
    if isinstance(plain.get("content"), list):
        plain["content"] = [{k: v for k, v in part.items() if k != "weight"} for part in plain["content"]]
    return plain
