"""A short cut to the turns of plain conversations: what a template writes between messages is the same in most rows.

What stood between two messages is learnt from rows that were aligned exactly. A later row's text is then put together
from its own words and what was learnt; where that is, letter for letter, what the template has rendered, the turns
stand where they were put, and no second rendering is needed. Any other row is aligned exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshtune.data.formats import Conversation, Message
from meshtune.data.template import ChatTemplate
from meshtune.data.turns import Turn, rest_of_prompt

LESSONS = 3

_PLAIN = {"role", "content"}


@dataclass(frozen=True, slots=True)
class _Glue:
    """The text between two messages; of it, `closes` characters are still learnt with the message before, and
    `opens` with the one after. `rest` is what it leaves out of the generation prompt, if it ends in one.
    """

    text: str
    closes: int
    opens: int
    rest: str = ""


class Glue:
    """What a template writes between the messages of plain conversations: roles and strings, no tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[Any, tuple[_Glue, int]] = {}

    def turns(self, conversation: Conversation, text: str) -> list[Turn] | None:
        """Return where the assistant messages stand in the text; None where that is not certain."""
        messages = conversation.messages
        if not is_plain(conversation):
            return None
        glue = []
        for key in _keys(messages):
            known, seen = self._known.get(key, (None, 0))
            if known is None or seen < LESSONS:
                return None
            glue.append(known)
        written = sum(len(piece.text) for piece in glue)
        for form in (str, str.strip):
            words = [form(message["content"]) for message in messages]
            if len(text) == written + sum(map(len, words)) and text == _joined(glue, words):
                begun = any(g.rest and word.startswith(g.rest) for g, word in zip(glue, words, strict=False))
                return None if begun else _turns(messages, glue, words)
        return None

    def learn(self, conversation: Conversation, text: str, turns: list[Turn]) -> None:
        """Learn from a row whose turns are known."""
        places = _places(conversation.messages, text, turns) if is_plain(conversation) else None
        if places is None:
            return
        spoken = {turn.index: turn for turn in turns}
        borders = [(0, 0), *places, (len(text), len(text))]
        for index, (key, (before, after)) in enumerate(
            zip(_keys(conversation.messages), pairwise(borders), strict=True)
        ):
            closes = spoken[index - 1].end - before[1] if index - 1 in spoken else 0
            opens = after[0] - spoken[index].start if index in spoken else 0
            if opens < 0 or closes < 0:
                continue
            rest = rest_of_prompt(self._template, text, after[0]) if index in spoken and not opens else ""
            glue = _Glue(text[before[1] : after[0]], closes, opens, rest)
            known, seen = self._known.get(key, (glue, 0))
            self._known[key] = (glue, seen + 1 if known == glue else 1)


def is_plain(conversation: Conversation) -> bool:
    """Tell whether a conversation holds nothing but roles and strings."""
    return conversation.tools is None and all(
        message.keys() == _PLAIN and type(message["content"]) is str for message in conversation.messages
    )


def _keys(messages: list[Message]) -> list[Any]:
    """Return, for the gap before each message and the one after the last, what its text may depend on."""
    roles = [None, *(message["role"] for message in messages), None]
    asked = max((index for index, role in enumerate(roles) if role == "user"), default=0)
    last = len(roles) - 2
    return [
        (before, after, min(index, 2), index >= last, index >= asked)
        for index, (before, after) in enumerate(pairwise(roles))
    ]


def _joined(glue: list[_Glue], words: list[str]) -> str:
    pieces = [glue[0].text]
    for word, piece in zip(words, glue[1:], strict=True):
        pieces += [word, piece.text]
    return "".join(pieces)


def _turns(messages: list[Message], glue: list[_Glue], words: list[str]) -> list[Turn]:
    turns, at = [], 0
    for index, message in enumerate(messages):
        at += len(glue[index].text)
        end = at + len(words[index])
        if message["role"] == "assistant":
            turns.append(Turn(index, at - glue[index].opens, end, end + glue[index + 1].closes))
        at = end
    return turns


def _places(messages: list[Message], text: str, turns: list[Turn]) -> list[tuple[int, int]] | None:
    """Return where each message's words stand in the text, or None where that is not plain to see."""
    ends = {turn.index: turn.content for turn in turns}
    forms: list[Callable[[str], str]] = [str, str.strip]
    for form in forms:
        places: list[tuple[int, int]] = []
        ceiling = len(text)
        for index in range(len(messages) - 1, -1, -1):
            words = form(messages[index]["content"])
            floor = max((end for turn, end in ends.items() if turn < index), default=0)
            end = ends[index] if index in ends else text.rfind(words, floor, ceiling) + len(words)
            start = end - len(words)
            if not words or start < floor or not text.startswith(words, start):
                break
            if index not in ends and text.count(words, floor, ceiling) != 1:
                break
            places.append((start, end))
            ceiling = start
        else:
            return places[::-1]
    return None
