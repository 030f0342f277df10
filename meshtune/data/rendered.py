"""A conversation as its template renders it, whole, in parts and with words replaced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshtune.data.formats import Conversation, Message
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

    def ending_in_mark(self, turn: int, prompt: bool = False) -> str | None:
        """Return the rendering of the messages before `turn` and a plain assistant message that says the
        first mark.
        """
        messages = [*self.messages[:turn], with_mark(self.messages[turn], self.marks[0])]
        text = attempt(self.template.render, messages, self.conversation.tools, prompt=prompt)
        return text if text is not None and self.marks[0] in text else None

    def _holds(self, area: int) -> bool:
        return any(chr(area + offset) in self.text for offset in range(11))


def with_mark(message: Message, mark: str) -> Message:
    """Return a plain assistant message that says the mark, its content shaped as the given message's."""
    as_parts = isinstance(message.get("content"), list)
    return {"role": "assistant", "content": [{"type": "text", "text": mark}] if as_parts else mark}
