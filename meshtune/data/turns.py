"""What the model must produce in a turn: all from the end of the generation prompt to the terminator.

Supervised is what follows the prompt that the model is given at inference: text that the template itself
writes between generation prompt and content (an empty `<think>` block, a space), the content, and the turn's
first terminator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshtune.data.alignment import Rendered, Span, common_prefix, common_suffix, content_spans

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


class TurnSpans:
    """Finds the supervised spans of rendered conversations.

    Borders are found exactly, by rendering parts of the conversation, until turns of a kind (same neighbours,
    same fields) have shown the same text around the border; then that text is looked for, and rendering is
    the fallback. So a conversation of n turns takes two renderings, not 2n.
    """

    def __init__(self) -> None:
        self._openings: dict[Any, _Pattern] = {}
        self._endings: dict[Any, _Pattern] = {}

    def find(self, rendered: Rendered) -> list[Span]:
        """Return [start, end) for each assistant message to be learnt (weight 0 leaves it out). Raises
        UnusableRow.
        """
        contents = content_spans(rendered)
        spans: list[Span] = []
        floor = 0
        for number, (turn, (start, end)) in enumerate(zip(rendered.turns, contents, strict=True)):
            ceiling = contents[number + 1][0] if number + 1 < len(contents) else len(rendered.text)
            span = (
                self._opening(rendered, turn, floor, start),
                min(self._ending(rendered, turn, end), ceiling),
            )
            floor = span[1]
            if span[0] < span[1] and rendered.messages[turn].get("weight") != 0:
                spans.append(span)
        return spans

    def _opening(self, rendered: Rendered, turn: int, floor: int, content: int) -> int:
        kind, text = _kind(rendered, turn), rendered.text
        pattern = self._openings.get(kind)
        seen = pattern.outside + pattern.inside if pattern is not None and pattern.trusted else None
        if pattern is not None and seen is not None and text.endswith(seen, floor, content):
            return content - len(pattern.inside)
        start = max(floor, _exact_opening(rendered, turn, floor, content))
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
        return _after_header(text, template.header, floor, content)
    if prompt == before:
        return _without_header(rendered, turn, before, content)
    shared = common_prefix(prompt, text)
    if shared >= len(before):
        return min(template.outside_token(text, shared), content)
    return _after_header(text, prompt[len(before) :], floor, content)  # the template has rewritten earlier turns


def _after_header(text: str, header: str, floor: int, content: int) -> int:
    at = text.rfind(header, floor, content) if header else -1
    return at + len(header) if at >= 0 else content


def _without_header(rendered: Rendered, turn: int, before: str, content: int) -> int:
    """Return the start where the prompt ends without a header: white space that leads the content is the
    model's to write; anything else that the template writes there can only be a header, which nobody will
    write for the model.
    """
    plain = rendered.ending_in_mark(turn)
    if plain is None or not plain.startswith(before) or not rendered.text.startswith(before):
        return content
    lead = plain[len(before) : plain.index(rendered.marks[0])]
    return content if lead.strip() else min(len(before), content)


def _exact_ending(rendered: Rendered, turn: int, content: int) -> int:
    """Return the end of the turn's first terminator, or of all the turn's text where there is none."""
    boundary = _turn_boundary(rendered, turn, content)
    terminator = rendered.template.first_terminator(rendered.text[content:boundary])
    return boundary if terminator is None else content + terminator


def _turn_boundary(rendered: Rendered, turn: int, content: int) -> int:
    """Return where this turn's text ends: what a rendering up to this turn shares with the whole."""
    text = rendered.text
    if turn + 1 == len(rendered.messages):
        return len(text)
    through = rendered.part(turn + 1)
    shared = common_prefix(through, text) if through is not None else 0
    if shared < content:  # refused, or the template has rewritten earlier turns
        plain = rendered.ending_in_mark(turn)
        tail = plain[plain.index(rendered.marks[0]) + len(rendered.marks[0]) :] if plain else ""
        shared = content + common_prefix(tail, text[content:])
    return rendered.template.outside_token(text, shared)
