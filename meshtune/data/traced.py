"""What a chat template does with plain conversations, learnt from one rendering and used for all that take the same way.

A conversation is rendered with probes in the place of its contents. A probe answers every question that the template asks of
a content (`'</think>' in content`, `content.startswith(...)`, whether it is empty) with the truth, and keeps question and
answer; what the template makes of it (`content | trim`, a part of `content.split(...)`) is a probe again. So the way through
the template is known to depend on these answers and on the roles alone, and any conversation with the same roles and answers
is the same pieces of text with its own contents between them. That costs a tenth of a rendering.

Where a template does anything else with a content, nothing is learnt of it, and conversations are rendered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshtune.data.formats import Message

_WAYS_OF_ROLES = 8  # with more, answers differ from row to row, as lengths do
_KINDS_OF_ROLES = 256
# Characters that anything but plain output would change, and none that is cut off at an end.
_MARK = "\ue000<&'\"\\\n\t\u00e9%{}[]\ue001"

Step = tuple[str, tuple[Any, ...], int | None]  # a method of strings, its arguments, which part of a list it returns
Place = tuple[int, tuple[Step, ...]]  # a message, and what is made of its content


class Untraceable(BaseException):
    """Raised through the template, which could handle an Exception: it does with a content what a probe cannot follow."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Questions with their answers, and the text: pieces, with contents between them."""

    questions: tuple[tuple[Place, Step, Any], ...]
    pieces: tuple[str, ...]
    fills: tuple[Place, ...]

    def text(self, contents: Sequence[str]) -> str | None:
        """Return the text with these contents, or None where an answer is another."""
        for place, (name, arguments, _), answer in self.questions:
            if _ask(_made(contents, place), name, arguments) != answer:
                return None
        written = [self.pieces[0]]
        for place, piece in zip(self.fills, self.pieces[1:], strict=True):
            written += (_made(contents, place), piece)
        return "".join(written)


class Ways:
    """The ways through one template that have been learnt. It can be pickled."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[_Way]] = {}
        self._traceable = True

    def text(self, messages: Sequence[Message]) -> str | None:
        """Return the text of messages that take a known way, None for others."""
        ways = self._known.get(tuple([message["role"] for message in messages]))
        if not ways:
            return None
        contents = [message["content"] for message in messages]
        for way in ways:
            if (text := way.text(contents)) is not None:
                return text
        return None

    def learn(self, messages: Sequence[Message], text: str, render: Callable[[list[Message]], str]) -> None:
        """Learn the way that messages with this text take; `render` is that of `environments.traceable`."""
        roles = tuple(message["role"] for message in messages)
        ways = self._known.get(roles, [])
        if not self._traceable or len(ways) >= _WAYS_OF_ROLES or len(self._known) >= _KINDS_OF_ROLES:
            return
        tracer = _Tracer()
        try:
            way = tracer.way(
                render([{**m, "content": tracer.probe(m["content"], (i, ()))} for i, m in enumerate(messages)])
            )
        except (Untraceable, Exception):  # it has not raised with the contents themselves
            way = None
        if way is None or way.text([message["content"] for message in messages]) != text:
            self._traceable, self._known = False, {}
            return
        self._known[roles] = [*ways, way]


class _Tracer:
    """One rendering with probes."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._places: dict[str, Place] = {}
        self._questions: list[tuple[Place, Step, Any]] = []

    def probe(self, text: str, place: Place) -> Probe:
        """Return a probe that stands for a text at a place."""
        mark = f"{_MARK}{next(self._numbers)}{_MARK}"
        self._places[mark] = place
        made = Probe(mark)
        made.tracer, made.text, made.place = self, text, place
        return made

    def asked(self, probe: Probe, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return what a method of the text returns: probes for strings, and a true answer, which is kept."""
        if any(type(argument) not in (str, int, slice, type(None)) for argument in arguments):
            raise Untraceable(name)
        if (
            name == "__getitem__" and type(arguments[0]) is not slice
        ):  # where the content is too short, jinja goes on without it
            raise Untraceable(name)
        result, (message, steps) = _ask(probe.text, name, arguments), probe.place
        if type(result) is str:
            return self.probe(result, (message, (*steps, (name, arguments, None))))
        if type(result) is list:
            self._keep(probe.place, (f"len {name}", arguments, None), len(result))
            return [
                self.probe(part, (message, (*steps, (name, arguments, number)))) for number, part in enumerate(result)
            ]
        if type(result) not in (bool, int):
            raise Untraceable(name)
        self._keep(probe.place, (name, arguments, None), result)
        return result

    def _keep(self, *question: Any) -> None:
        if question not in self._questions:
            self._questions.append(question)

    def way(self, text: str) -> _Way:
        """Return the way that led to a text. Raises Untraceable where a probe was changed on it."""
        found = sorted((at, mark) for mark in self._places for at in _every(text, mark))
        pieces, at = [], 0
        for start, mark in found:
            pieces.append(text[at:start])
            at = start + len(mark)
        pieces.append(text[at:])
        if any("\ue000" in piece or "\ue001" in piece for piece in pieces):
            raise Untraceable("a content does not stand in the text as it is")
        return _Way(tuple(self._questions), tuple(pieces), tuple(self._places[mark] for _, mark in found))


def _followed(name: str) -> Callable[..., Any]:
    def method(probe: Probe, *arguments: Any) -> Any:
        return probe.tracer.asked(probe, name, arguments)

    return method


def _refused(name: str) -> Callable[..., Any]:
    def method(probe: Probe, *arguments: Any, **named: Any) -> Any:
        raise Untraceable(name)

    return method


class Probe(str):
    """A string that stands for a content, and of which nothing can be learnt but through its tracer."""

    __slots__ = ("place", "text", "tracer")
    tracer: _Tracer
    text: str
    place: Place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and bool(self.tracer.asked(self, "__eq__", (other,)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != ""

    def __add__(self, other: str) -> Joined:
        return Joined(str.__add__(self, other))

    def __radd__(self, other: str) -> Joined:
        return Joined(str.__add__(other, self))

    __hash__ = None  # type: ignore[assignment]


class Joined(str):
    """Contents with text around them: it can be joined on and written, and nothing else."""

    __slots__ = ()
    __add__ = Probe.__add__
    __radd__ = Probe.__radd__
    __eq__ = _refused("__eq__")
    __ne__ = _refused("__ne__")
    __bool__ = _refused("__bool__")
    __hash__ = None  # type: ignore[assignment]


_FOLLOWED = {
    "__contains__",
    "__getitem__",
    "count",
    "endswith",
    "find",
    "isalnum",
    "isalpha",
    "isdigit",
    "isspace",
    "istitle",
}
_FOLLOWED |= {
    "lower",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
}
_FOLLOWED |= {"upper"}
_COMPARISONS = {"__lt__", "__le__", "__gt__", "__ge__"}
_OF_EVERY_OBJECT = set(dir(object)) - _COMPARISONS - {"__format__", "__repr__", "__reduce__", "__reduce_ex__"}
_OF_STRINGS = (set(dir(str)) | {"__int__", "__float__", "__index__"}) - _OF_EVERY_OBJECT - {"__add__", "__getnewargs__"}
for _name in _OF_STRINGS:
    setattr(Probe, _name, _followed(_name) if _name in _FOLLOWED else _refused(_name))
    setattr(Joined, _name, _refused(_name))


def _ask(text: str, name: str, arguments: tuple[Any, ...]) -> Any:
    if name.startswith("len "):
        return len(getattr(text, name[4:])(*arguments))
    return getattr(text, name)(*arguments)


def _made(contents: Sequence[str], place: Place) -> str:
    text = contents[place[0]]
    for name, arguments, part in place[1]:
        result = getattr(text, name)(*arguments)
        text = result if part is None else result[part]
    return text


def _every(text: str, mark: str) -> list[int]:
    found, at = [], text.find(mark)
    while at >= 0:
        found.append(at)
        at = text.find(mark, at + 1)
    return found
