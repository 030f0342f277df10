"""Reasoning of every turn kept in the text, though the template strips it from all but the last.

A turn is rendered once more as the end of a conversation, where the template shows its reasoning, and put in place of
the stripped one: the text is then what the model has read and written turn by turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshtune.data.formats import Conversation, Message, message_text
from meshtune.data.rendered import Rendered, Span
from meshtune.data.rows import UnusableRow
from meshtune.data.template import attempt
from meshtune.data.turns import Turn, TurnSpans

FIELDS = ("reasoning_content", "reasoning", "thinking")

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Edit:
    """A stretch [start, end) of the text in the turn of one message, what stands there instead, and where in that the
    model begins to speak.
    """

    message: int
    start: int
    end: int
    text: str
    begins: int


def thought_of(message: Message) -> tuple[str, str]:
    """Return a message's reasoning and its answer, both stripped; the reasoning is "" where it has none."""
    text = message_text(message)
    for field in FIELDS:
        if isinstance(message.get(field), str) and message[field].strip():
            return message[field].strip(), text.strip()
    if _CLOSE not in text:
        return "", text.strip()
    thought, _, answer = text.partition(_CLOSE)
    return thought.partition(_OPEN)[2].strip() if _OPEN in thought else thought.strip(), answer.strip()


def left_out(rendered: Rendered, turns: list[Turn]) -> list[Turn]:
    """Return the turns whose reasoning the template does not show."""
    found = []
    for turn in turns:
        thought, _ = thought_of(rendered.messages[turn.index])
        if thought and thought not in rendered.text[turn.start : turn.end]:
            found.append(turn)
    return found


def restored(finder: TurnSpans, rendered: Rendered, turn: Turn) -> Edit:
    """Return the edit that puts a turn's reasoning back.

    Raises UnusableRow where the template shows it nowhere, or shows the answer in another way beside it, and its
    generation prompt does not open it either.
    """
    thought, answer = thought_of(rendered.messages[turn.index])
    for message in _forms(rendered.messages[turn.index]):
        conversation = Conversation([*rendered.messages[: turn.index], message], rendered.conversation.tools)
        text = attempt(rendered.template.render, conversation.messages, conversation.tools)
        if text is None or thought not in text:
            continue
        shown = finder.find(Rendered(rendered.template, conversation, text))[-1]
        body = rendered.template.without_terminators(text[shown.start : shown.end])
        if thought in body and answer in body:
            return _edit(rendered, turn, text, shown, body)
    if edit := _after_an_open_prompt(rendered, turn, thought):
        return edit
    raise UnusableRow(
        "the chat template has no place for the reasoning that `reasoning: keep` asks for", f"message {turn.index}"
    )


def applied(text: str, edits: list[Edit]) -> str:
    """Return the text with all edits made; they are sorted and disjoint."""
    pieces, at = [], 0
    for edit in edits:
        pieces += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*pieces, text[at:]])


def moved(span: Span, edits: list[Edit]) -> Span:
    """Return where a span of the old text stands in the new one, after what is put back at its own start."""
    start, end = span
    return start + sum(_longer(edit) for edit in edits if edit.start <= start), _moved(end, edits)


def spoken(turn: Turn, edits: list[Edit]) -> list[Span]:
    """Return a turn's spans in the new text, its reasoning in them."""
    spans = [(_moved(start, edits), _moved(end, edits)) for start, end in turn.spans]
    for edit in edits:
        if edit.message == turn.index and spans:
            return [(_moved(edit.start, edits) + edit.begins, spans[0][1]), *spans[1:]]
    return spans


def _moved(at: int, edits: list[Edit]) -> int:
    return at + sum(_longer(edit) for edit in edits if edit.start < at)


def _longer(edit: Edit) -> int:
    return len(edit.text) - (edit.end - edit.start)


def _edit(rendered: Rendered, turn: Turn, text: str, shown: Turn, body: str) -> Edit:
    """Return the edit from a turn to the same turn as it is shown at the end of a conversation, terminators kept.

    The generation prompt may open the reasoning (`<think>`), and history may show less of it: both texts are cut
    where the same amount of it has been written.
    """
    written = rendered.template.written
    here, there = written(rendered.text, turn.start), written(text, shown.start)
    start, begin = turn.start - max(0, here - there), shown.start - max(0, there - here)
    old = rendered.text[turn.start : turn.end]
    end = turn.start + len(rendered.template.without_terminators(old))
    return Edit(turn.index, start, end, text[begin : shown.start] + body, shown.start - begin)


def _after_an_open_prompt(rendered: Rendered, turn: Turn, thought: str) -> Edit | None:
    """Return the edit that writes the reasoning after a generation prompt that opens it (`<think>`), for a template that
    shows none in any turn: so the model writes it at inference.
    """
    template, text = rendered.template, rendered.text
    opening = template.header[template.written(text, turn.start) :]
    if not opening.rstrip().endswith(_OPEN):
        return None
    gap = "" if text.startswith("\n", turn.start) else "\n\n"
    return Edit(turn.index, turn.start, turn.start, f"{opening}{thought}\n{_CLOSE}{gap}", len(opening))


def _forms(message: Message) -> Iterator[Message]:
    """Yield a message with its reasoning in the ways that templates look for it."""
    yield message
    thought, answer = thought_of(message)
    plain = {key: value for key, value in message.items() if key not in FIELDS}
    for field in FIELDS:
        yield {**plain, "content": answer, field: thought}
    yield {**plain, "content": f"{_OPEN}\n{thought}\n{_CLOSE}\n\n{answer}"}
