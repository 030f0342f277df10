"""The model's own chat template, rendered as text. The template decides; what it refuses makes a row
unusable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from meshtune.data.affixes import common_prefix
from meshtune.data.formats import Conversation, Message
from meshtune.data.rendering import PlainRendering
from meshtune.data.rows import UnusableRow
from meshtune.data.variants import variants
from meshtune.errors import DataError

_LONGEST_TOKEN = 256


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template. Raises DataError where there is none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template, which rows "
                "of `messages` need: use an instruction model's tokenizer, give it a template, or train on "
                "`format: text`"
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._added = _any_of(token.content for token in added)
        self._special = _any_of([token.content for token in added if token.special] + tokenizer.all_special_tokens)
        self._plain = PlainRendering(tokenizer)
        self.header = self._generation_header()
        self._stop = self._end_of_every_turn()

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """Return the rendered text, with the generation prompt if `prompt`. Raises UnusableRow if it is
        refused.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise anything: its own refusals, type and key errors
            raise UnusableRow("the chat template refuses the row", f"{type(error).__name__}: {error}") from error

    def render_plain(self, messages: list[Message]) -> str:
        """Return the rendered text of messages that are roles and strings, as `render` does, only sooner."""
        if not self._plain.trusted:
            compared = self.render(messages, None)
            self._plain.compare(messages, compared)
            return compared
        try:
            text = self._plain.render(messages)
        except Exception as error:
            raise UnusableRow("the chat template refuses the row", f"{type(error).__name__}: {error}") from error
        return self.render(messages, None) if text is None else text

    def accepted(self, conversation: Conversation, rendered: str | None = None) -> tuple[Conversation, str]:
        """Return the first equivalent shape of a conversation that the template renders in full, and the
        text.

        Templates differ in whether tool-call arguments are objects or JSON strings, and in whether content is
        a string or a list of parts; rows do, too. `rendered` is the text of the row's own shape, if it is known.
        Raises UnusableRow with the complaint about the row's own shape.
        """
        complaints: list[UnusableRow] = []
        for shape in variants(conversation):
            rendered = rendered if not complaints else None
            try:
                text = self.render(shape.messages, shape.tools) if rendered is None else rendered
                _check_shown(shape.messages, text)
                return shape, text
            except UnusableRow as complaint:
                complaints.append(complaint)
        raise complaints[0]

    def outside_token(self, text: str, at: int) -> int:
        """Return `at`, or the start of the added token that `at` would cut in two."""
        low = max(0, at - _LONGEST_TOKEN)
        for token in self._added.finditer(text, low, at + _LONGEST_TOKEN):
            if token.start() < at < token.end():
                return token.start()
        return at

    def terminator(self, tail: str) -> int | None:
        """Return the end of the terminator in a turn's tail, or None: its first special token (else its first
        added token); or the end of sequence after it, where the template ends every turn with both.
        """
        token = self._special.search(tail) or self._added.search(tail)
        if token is None:
            return None
        stop = tail.find(self._stop, token.end()) if self._stop else -1
        if stop >= 0 and not self.without_terminators(tail[token.end() : stop]):
            return stop + len(self._stop)
        return token.end()

    def written(self, text: str, at: int) -> int:
        """Return how many characters of the generation prompt's header stand in the text right before `at`."""
        header = self.header
        return next((n for n in range(len(header), 0, -1) if text.endswith(header[:n], 0, at)), 0)

    def closed(self, turn: str) -> int:
        """Return the end of a turn whose text runs on into the next header: after its end of sequence, if that is
        among the special tokens at its end; else all of it.
        """
        body = len(self.without_terminators(turn))
        stop = turn.find(self._stop, body) if self._stop else -1
        return len(turn) if stop < 0 else stop + len(self._stop)

    def first_token(self, header: str) -> int:
        """Return the length of a header up to the end of its first added token; all of it without one."""
        token = self._added.search(header)
        return token.end() if token else len(header)

    def without_terminators(self, turn: str) -> str:
        """Return a turn's text without the special tokens and white space at its end."""
        while True:
            shorter = turn.rstrip()
            tokens = [token for token in self._special.finditer(shorter) if token.end() == len(shorter)]
            if not tokens:
                return shorter
            turn = shorter[: tokens[-1].start()]

    def _generation_header(self) -> str:
        """Return what the generation prompt appends to a user turn; "" where it appends nothing."""
        probe: list[Message] = [{"role": "user", "content": "x"}]
        try:
            plain, prompted = self.render(probe, None), self.render(probe, None, prompt=True)
        except UnusableRow:
            return ""
        return prompted.removeprefix(plain) if prompted.startswith(plain) else ""

    def _end_of_every_turn(self) -> str:
        """Return the tokenizer's end of sequence if it ends an assistant turn that is not the last; else ""."""
        asked, said = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y\ue000"}
        eos = self._tokenizer.eos_token
        if not eos:
            return ""
        try:
            through, whole = self.render([asked, said], None), self.render([asked, said, asked], None)
        except UnusableRow:
            return ""
        ends = [text[text.find("\ue000") :] for text in (through, whole)]
        return eos if eos in ends[0][: common_prefix(*ends)] else ""


def attempt(render: Callable[..., str], *args: Any, **kwargs: Any) -> str | None:
    """Return a rendering, or None where the template refuses it (parts of conversations often are)."""
    try:
        return render(*args, **kwargs)
    except UnusableRow:
        return None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the tokens, the longest first; without tokens, nothing."""
    longest_first = sorted({token for token in tokens if token}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _check_shown(messages: list[Message], text: str) -> None:
    """Raise UnusableRow when a user's or system's text, or a tool call, is missing from the rendered text.

    Templates pass over roles and fields that they do not know. Answers and tool results are left out of the
    check: templates strip reasoning from the ones and re-encode the others by intention.
    """
    for index, message in enumerate(messages):
        where = f"message {index}, role {message['role']}"
        content = message.get("content")
        parts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        printed_raw = isinstance(content, list) and repr(content) in text
        checked = message["role"] not in ("assistant", "tool", "function", "ipython")
        if printed_raw or (checked and any(part.strip() not in text for part in parts)):
            raise UnusableRow("the chat template leaves a message's text out", where)
        if any(name not in text for name in called(message)):
            raise UnusableRow("the chat template leaves a tool call out", where)


def called(message: Message) -> Iterator[str]:
    """Yield the names of the functions that a message calls."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]
