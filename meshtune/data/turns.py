"""What the model must produce in a turn: all from the end of the generation prompt to the terminator.

Supervised is what follows the prompt that the model is given at inference: text that the template itself
writes between generation prompt and content (an empty `<think>` block, a space), the content, and the turn's
first terminator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshtune.data.affixes import common_prefix, common_suffix
from meshtune.data.alignment import content_spans
from meshtune.data.calls import check_calls_shown, check_results_apart, content_after, results_after, results_region
from meshtune.data.rendered import Rendered, Span
from meshtune.data.template import ChatTemplate

_WINDOW = 64
_LESSONS = 3


@dataclass
class _Pattern:
    """What stood around a border in the turns seen so far: `inside` is supervised, `outside` is not."""

    inside: str
    outside: str
    seen: int = 1
    constant: bool = True

    @property
    def trusted(self) -> bool:
        return self.constant and self.seen >= _LESSONS and bool(self.inside or self.outside)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one assistant message stands in the text, in characters.

    `start` is the end of the generation prompt, `content` the end of the message's own text, `end` that of its
    terminator. `later` holds what the model says after results that the template writes into the turn.
    """

    index: int
    start: int
    content: int
    end: int
    later: tuple[Span, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """What the model must produce: [start, end) of each part."""
        return [span for span in ((self.start, self.end), *self.later) if span[0] < span[1]]


class TurnSpans:
    """Finds the turns of rendered conversations.

    Borders are found exactly, by rendering parts of the conversation, until turns of a kind (same neighbours,
    same fields) have shown the same text around the border; then that text is looked for, and rendering is
    the fallback. So a conversation of n turns takes two renderings, not 2n.
    """

    def __init__(self) -> None:
        self._openings: dict[Any, _Pattern] = {}
        self._endings: dict[Any, _Pattern] = {}
        self._results_apart: Counter[Any] = Counter()

    def find(self, rendered: Rendered) -> list[Turn]:
        """Return where each assistant message stands, in order. Raises UnusableRow."""
        contents = content_spans(rendered)
        found: list[Turn] = []
        floor = 0
        for number, (turn, (start, end)) in enumerate(zip(rendered.turns, contents, strict=True)):
            ceiling = contents[number + 1][0] if number + 1 < len(contents) else len(rendered.text)
            opened = self._opening(rendered, turn, floor, start)
            closed = min(self._ending(rendered, turn, end), ceiling)
            found.append(self._without_results(rendered, Turn(turn, opened, end, closed)))
            floor = closed
            check_calls_shown(rendered, turn, (opened, closed))
        return found

    def _without_results(self, rendered: Rendered, turn: Turn) -> Turn:
        """Return the turn without the results of its calls, where the template writes them into it."""
        if not rendered.messages[turn.index].get("tool_calls") or not results_after(rendered, turn.index):
            return turn
        kind = _kind(rendered, turn.index)
        if self._results_apart[kind] >= _LESSONS:
            return turn
        region = results_region(rendered, turn.index)
        if region is None:
            check_results_apart(rendered, turn.index, (turn.start, turn.end))
        if region is None or region[0] >= turn.end:
            self._results_apart[kind] += 1
            return turn
        said = content_after(rendered, turn.index, region[0])
        later = said or (region[1], turn.end)
        end = turn.start + rendered.template.closed(rendered.text[turn.start : region[0]])
        content = min(turn.content, region[0])
        return Turn(turn.index, turn.start, content, end, (later,) if later[0] < later[1] else ())

    def _opening(self, rendered: Rendered, turn: int, floor: int, content: int) -> int:
        kind, text = _kind(rendered, turn), rendered.text
        pattern = self._openings.get(kind)
        seen = pattern.outside + pattern.inside if pattern is not None and pattern.trusted else None
        if pattern is not None and seen is not None and text.endswith(seen, floor, content):
            start = content - len(pattern.inside)
            if pattern.inside or not text.startswith(rest_of_prompt(rendered.template, text, start), start):
                return start
        start = max(floor, _exact_opening(rendered, turn, floor, content))
        if start > content:
            self._openings[kind] = _Pattern("", "", constant=False)
            return start
        before = text[max(0, start - _WINDOW) : start]
        shared = before if pattern is None else before[len(before) - common_suffix(pattern.outside, before) :]
        self._openings[kind] = _learnt(pattern, text[start:content], shared)
        return start

    def _ending(self, rendered: Rendered, turn: int, content: int) -> int:
        kind, text = _kind(rendered, turn), rendered.text
        pattern = self._endings.get(kind)
        if pattern is not None and pattern.trusted and text.startswith(pattern.inside + pattern.outside, content):
            return content + len(pattern.inside)
        end = _exact_ending(rendered, turn, content)
        after = text[end : end + _WINDOW]
        shared = after if pattern is None else after[: common_prefix(pattern.outside, after)]
        self._endings[kind] = _learnt(pattern, text[content:end], shared)
        return end


def rest_of_prompt(template: ChatTemplate, text: str, at: int) -> str:
    """Return what of the generation prompt does not stand before `at`: a turn that begins with it begins later. A mark
    that no text holds where there is nothing left of it.
    """
    return template.header[template.written(text, at) :] or "\0"


def _learnt(pattern: _Pattern | None, inside: str, outside: str) -> _Pattern:
    if pattern is None:
        return _Pattern(inside, outside)
    return _Pattern(inside, outside, pattern.seen + 1, pattern.constant and pattern.inside == inside)


def _kind(rendered: Rendered, turn: int) -> tuple[Any, ...]:
    messages = rendered.messages
    previous = messages[turn - 1]["role"] if turn else None
    following = messages[turn + 1]["role"] if turn + 1 < len(messages) else None
    return previous, following, turn < 2, bool(rendered.conversation.tools), frozenset(messages[turn])


def _exact_opening(rendered: Rendered, turn: int, floor: int, content: int) -> int:
    """Return where the generation prompt for this turn ends in the text, at most the content's start."""
    text, template = rendered.text, rendered.template
    before, prompt = rendered.part(turn), rendered.part(turn, prompt=True)
    if before is None or prompt is None or not prompt.startswith(before):
        return _after_header(rendered, template.header, floor, content)
    if prompt == before:
        return _without_header(rendered, turn, before, content)
    shared = common_prefix(prompt, text)
    if shared == len(prompt):  # what differs between renderings may begin inside the prompt
        return shared
    if shared >= len(before):
        return min(template.outside_token(text, shared), content)
    return _after_header(rendered, prompt[len(before) :], floor, content)  # the template has rewritten earlier turns


def _after_header(rendered: Rendered, header: str, floor: int, content: int) -> int:
    """Return where the generation prompt ends before a content, or as much of it as the text shows, its first
    token at least; the content's start if there is none of it.
    """
    text, shortest = rendered.text, rendered.template.first_token(header)
    for length in range(len(header), max(shortest, 1) - 1, -1):
        at = text.rfind(header[:length], floor, content)
        if at >= 0:
            return max(floor, min(rendered.template.outside_token(text, at + length), content))
    return content


def _without_header(rendered: Rendered, turn: int, before: str, content: int) -> int:
    """Return the start where the prompt ends without a header: white space that leads the content is the
    model's to write; anything else that the template writes there can only be a header, which nobody will
    write for the model.
    """
    plain = rendered.ending_in_mark(turn)
    if plain is None or not plain.startswith(before):
        return content
    lead = plain[len(before) : plain.index(rendered.marks[0])]
    if lead.strip():
        return content
    if rendered.text.startswith(before):
        return min(len(before), content)
    return content - len(lead) if rendered.text.endswith(lead, 0, content) else content


def _exact_ending(rendered: Rendered, turn: int, content: int) -> int:
    """Return the end of the turn's terminator, or of all the turn's text where there is none."""
    boundaries = []
    for boundary in _turn_boundaries(rendered, turn, content):
        terminator = rendered.template.terminator(rendered.text[content:boundary])
        if terminator is not None:
            return content + terminator
        boundaries.append(boundary)
    return boundaries[0] if boundaries else content


def _turn_boundaries(rendered: Rendered, turn: int, content: int) -> Iterator[int]:
    """Yield where this turn's text may end: what renderings that end it elsewhere share with the whole. The first
    is the one to take if no terminator stands before any of them.
    """
    text, outside = rendered.text, rendered.template.outside_token
    if turn + 1 == len(rendered.messages):
        yield len(text)
        return
    through, prompted = rendered.part(turn + 1), rendered.part(turn + 1, prompt=True)
    if through is not None and common_prefix(through, text) >= content:
        yield outside(text, common_prefix(through, text))
    region = results_region(rendered, turn)
    if region is not None and region[0] >= content:
        yield region[0]
    if prompted is not None:  # some templates end the very last turn in another way
        shared = common_prefix(prompted.removesuffix(rendered.template.header), text)
        if shared >= content:
            yield outside(text, shared)
    for prompt in (False, True):  # the template has rewritten earlier turns
        plain = rendered.ending_in_mark(turn, prompt)
        tail = plain[plain.index(rendered.marks[0]) + len(rendered.marks[0]) :] if plain else ""
        tail = tail.removesuffix(rendered.template.header) if prompt else tail
        yield outside(text, content + common_prefix(tail, text[content:]))
