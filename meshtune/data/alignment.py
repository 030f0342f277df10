"""Where each assistant's own text stands in a rendered conversation, for any template.

The method: render the conversation once more with the assistant's message replaced by a mark that occurs
nowhere else; what differs between the two renderings is that message's text. Nothing is assumed about headers
or terminators.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from meshtune.data.formats import Conversation, Message, message_text
from meshtune.data.rows import UnusableRow
from meshtune.data.template import ChatTemplate, attempt

Span = tuple[int, int]

_PRIVATE_AREAS = (0xE000, 0xF0000, 0x100000)


@dataclass(frozen=True)
class Rendered:
    """A conversation, its rendered text, and the parts of it that are asked for again and again."""

    template: ChatTemplate
    conversation: Conversation
    text: str

    @property
    def messages(self) -> list[Message]:
        """The messages, in the shape that the template accepted."""
        return self.conversation.messages

    @cached_property
    def turns(self) -> list[int]:
        """Indices of the assistant messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @cached_property
    def marks(self) -> list[str]:
        """One mark for each assistant message, of private-use characters that the text does not hold."""
        base = next((area for area in _PRIVATE_AREAS if not self._holds(area)), None)
        if base is None:
            raise UnusableRow("the text uses all private-use characters")
        digits = [chr(base + digit) for digit in range(10)]
        fence = chr(base + 10)
        return [fence + "".join(digits[int(d)] for d in str(n)) + fence for n in range(len(self.turns))]

    def part(self, count: int, prompt: bool = False) -> str | None:
        """Return the rendering of the first `count` messages, or None where the template refuses it."""
        if count == 0:
            return None
        return attempt(self.template.render, self.messages[:count], self.conversation.tools, prompt=prompt)

    def marked(self, replaced: dict[int, Message]) -> str | None:
        """Return the rendering with some messages replaced, or None where the template refuses it."""
        messages = [replaced.get(index, message) for index, message in enumerate(self.messages)]
        return attempt(self.template.render, messages, self.conversation.tools)

    def ending_in_mark(self, turn: int) -> str | None:
        """Return the rendering of the messages before `turn` and a plain assistant message that says the
        first mark.
        """
        messages = [*self.messages[:turn], with_mark(self.messages[turn], self.marks[0])]
        text = attempt(self.template.render, messages, self.conversation.tools)
        return text if text is not None and self.marks[0] in text else None

    def _holds(self, area: int) -> bool:
        return any(chr(area + offset) in self.text for offset in range(11))


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


def with_mark(message: Message, mark: str) -> Message:
    """Return a plain assistant message that says the mark, its content shaped as the given message's."""
    as_parts = isinstance(message.get("content"), list)
    return {"role": "assistant", "content": [{"type": "text", "text": mark}] if as_parts else mark}


def common_prefix(left: str, right: str) -> int:
    """Return the length of the longest common prefix, by bisection over slice comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(left: str, right: str) -> int:
    """Return the length of the longest common suffix."""
    return common_prefix(left[::-1], right[::-1])


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
    text, before, through = rendered.text, rendered.part(turn), rendered.part(turn + 1)
    plain = rendered.ending_in_mark(turn)
    if before is None or through is None or plain is None or not text.startswith(before):
        raise UnusableRow("the chat template does not show where an assistant message begins", f"message {turn}")
    start = min(common_prefix(plain, text), plain.index(rendered.marks[0]))
    start = rendered.template.outside_token(text, max(start, len(before)))
    end = rendered.template.outside_token(text, common_prefix(through, text))
    return start, start + len(rendered.template.without_terminators(text[start:end]))
