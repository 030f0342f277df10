"""Where each assistant's own text stands in a rendered conversation, for any template.

The method: render the conversation once more with the assistant's message replaced by a mark that occurs
nowhere else; what differs between the two renderings is that message's text. Nothing is assumed about headers
or terminators.
"""

from __future__ import annotations

import re
from itertools import pairwise

from meshtune.data.affixes import common_prefix, common_suffix
from meshtune.data.calls import end_of_calls, results_region, start_of_calls
from meshtune.data.formats import message_text
from meshtune.data.rendered import Rendered, Span, with_mark
from meshtune.data.rows import UnusableRow


def content_spans(rendered: Rendered) -> list[Span]:
    """Return [start, end) of each assistant's text, in order, template additions left out. Raises
    UnusableRow.
    """
    spans = _all_at_once(rendered)
    if spans is None:
        spans = [_one(rendered, turn) for turn in rendered.turns]
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise UnusableRow("the assistant's messages cannot be told apart in the rendered text")
    said = any(message_text(rendered.messages[turn]).strip() for turn in rendered.turns)
    if said and not any(rendered.text[start:end].strip() for start, end in spans):
        raise UnusableRow("the chat template leaves the assistants' text out")
    return spans


def _all_at_once(rendered: Rendered) -> list[Span] | None:
    """Align all turns from one marked rendering; None where that is not certain."""
    marks, messages = rendered.marks, rendered.messages
    marked = rendered.marked({t: with_mark(messages[t], m) for t, m in zip(rendered.turns, marks, strict=True)})
    if marked is None:
        return None
    pieces = re.split("|".join(map(re.escape, marks)), marked)
    if len(pieces) != len(marks) + 1 or not rendered.text.startswith(pieces[0]):
        return None
    if re.findall("|".join(map(re.escape, marks)), marked) != marks:
        return None
    spans: list[Span] = []
    at = len(pieces[0])
    for number, turn in enumerate(rendered.turns):
        following = pieces[number + 1]
        end = _end_before(rendered.text, at, following, message_text(messages[turn]), number + 1 == len(marks))
        if end is None:
            return None
        spans.append((at, end))
        at = end + len(following)
    return spans


def _end_before(text: str, at: int, following: str, content: str, last: bool) -> int | None:
    """Return where the content that starts at `at` ends, `following` coming after it; None if that is not
    certain.
    """
    if last:
        end = len(text) - len(following)
        return end if end >= at and text.endswith(following) else None
    if not following:
        return None
    for form in (content, content.strip()):
        if text.startswith(form + following, at):
            return at + len(form)
    return text.find(following, at) if text.count(following) == 1 and text.find(following) >= at else None


def _one(rendered: Rendered, turn: int) -> Span:
    """Return the span of one turn: what a rendering with only this message replaced does not share."""
    message, mark, text = rendered.messages[turn], rendered.marks[0], rendered.text
    plain = with_mark(message, mark)
    replacements = [plain] if message.get("tool_calls") else [plain, {**message, "content": plain["content"]}]
    for replacement in replacements:
        other = rendered.marked({turn: replacement})
        if other is not None and mark in other:
            start = common_prefix(text, other)
            end = max(start, len(text) - common_suffix(text[start:], other[start:]))
            start = rendered.template.outside_token(text, start)
            return start, max(start, rendered.template.outside_token(text, end))
    return _by_neighbours(rendered, turn)


def _by_neighbours(rendered: Rendered, turn: int) -> Span:
    """Return the span between the renderings that end before and after this message, its terminators left
    out.

    Some templates refuse a conversation in which a tool call has become plain text; so they are aligned by
    this.
    """
    start, end = _start_by_neighbours(rendered, turn), end_of_calls(rendered, turn)
    if end is None:
        region = results_region(rendered, turn)
        end = None if region is None else region[0]
    if start is None or end is None or end < start:
        raise UnusableRow("the chat template does not show where an assistant message begins", f"message {turn}")
    return start, start + len(rendered.template.without_terminators(rendered.text[start:end]))


def _start_by_neighbours(rendered: Rendered, turn: int) -> int | None:
    text, before, plain = rendered.text, rendered.part(turn), rendered.ending_in_mark(turn)
    if before is None or plain is None or not text.startswith(before):
        return start_of_calls(rendered, turn)
    start = min(common_prefix(plain, text), plain.index(rendered.marks[0]))
    return rendered.template.outside_token(text, max(start, len(before)))
