"""Where the results of a tool call stand in a rendered conversation, and where a call that a template lets nobody
replace begins.

Some templates write the results into the turn that called (`... <call> <result> answer <end>`), so that what
differs when the call is replaced is not the assistant's text alone; and some refuse a conversation in which a call
has become plain text. Both are aligned by leaving messages out.
"""

from __future__ import annotations

from meshtune.data.affixes import common_prefix, common_suffix
from meshtune.data.formats import Message, message_text
from meshtune.data.rendered import Rendered, Span, with_mark
from meshtune.data.rows import UnusableRow
from meshtune.data.template import attempt, called

_SPEAKERS = ("assistant", "user", "system", "developer")


def results_after(rendered: Rendered, turn: int) -> range:
    """Return the indices of the messages that answer an assistant message's calls: those between it and the next
    speaker.
    """
    stop = turn + 1
    while stop < len(rendered.messages) and rendered.messages[stop]["role"] not in _SPEAKERS:
        stop += 1
    return range(turn + 1, stop)


def results_region(rendered: Rendered, turn: int) -> Span | None:
    """Return [start, end) of the results of a turn's calls, headers and all, or None where there are none or where
    the template does not show them.
    """
    results = results_after(rendered, turn)
    if not results:
        return None
    text, without = rendered.text, _without(rendered, results)
    if without is None:
        start = end_of_calls(rendered, turn)
        return None if start is None else (start, start)
    start = rendered.template.outside_token(text, common_prefix(text, without))
    end = max(start, len(text) - common_suffix(text[start:], without[start:]))
    told = end_of_calls(rendered, turn)
    return (start if told is None else min(told, end)), end


def end_of_calls(rendered: Rendered, turn: int) -> int | None:
    """Return where the rendering up to this turn ends in the text, its last terminators apart; None where the
    template has written the turn in another way there.
    """
    through = rendered.part(turn + 1)
    if through is None:
        return None
    shared = rendered.template.outside_token(rendered.text, common_prefix(through, rendered.text))
    return None if rendered.template.without_terminators(through[shared:]) else shared


def start_of_calls(rendered: Rendered, turn: int) -> int | None:
    """Return where a turn's text begins: what a rendering without the turn, all calls and results up to the next
    answer, and the words of that answer, shares with the text. None where the template refuses that.
    """
    following = turn
    while following < len(rendered.messages) and rendered.messages[following].get("tool_calls"):
        following = results_after(rendered, following).stop
    change: dict[int, Message] = {}
    if following < len(rendered.messages) and rendered.messages[following]["role"] == "assistant":
        change[following] = with_mark(rendered.messages[following], rendered.marks[0])
    without = _without(rendered, range(turn, following), change)
    if without is None:
        return None
    return rendered.template.outside_token(rendered.text, common_prefix(rendered.text, without))


def content_after(rendered: Rendered, turn: int, border: int) -> Span | None:
    """Return [start, end) of the words of a calling turn, where the template writes them after the border."""
    text, message = rendered.text, rendered.messages[turn]
    if not message_text(message).strip():
        return None
    other = rendered.marked({turn: {**message, "content": with_mark(message, rendered.marks[0])["content"]}})
    if other is None or rendered.marks[0] not in other:
        return None
    start = common_prefix(text, other)
    return None if start < border else (start, len(text) - common_suffix(text[start:], other[start:]))


def check_calls_shown(rendered: Rendered, turn: int, span: Span) -> None:
    """Raise UnusableRow where the name of a function that a turn calls is not in the turn's text: a template that
    lists the tools shows the name elsewhere.
    """
    shown = rendered.text[slice(*span)]
    if any(name not in shown for name in called(rendered.messages[turn])):
        raise UnusableRow("the chat template leaves a tool call out", f"message {turn}, role assistant")


def check_results_apart(rendered: Rendered, turn: int, span: Span) -> None:
    """Raise UnusableRow where a result of a turn's calls stands inside the turn, and nothing tells where it ends."""
    for index in results_after(rendered, turn):
        other = rendered.marked({index: {**rendered.messages[index], "content": rendered.marks[0]}})
        if other is not None and span[0] <= common_prefix(rendered.text, other) < span[1]:
            raise UnusableRow("the chat template writes a tool's result into the assistant's turn", f"message {index}")


def _without(rendered: Rendered, left_out: range, change: dict[int, Message] | None = None) -> str | None:
    messages = [
        (change or {}).get(index, message) for index, message in enumerate(rendered.messages) if index not in left_out
    ]
    return attempt(rendered.template.render, messages, rendered.conversation.tools) if messages else None
