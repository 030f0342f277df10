"""Which encoder serves a format, and how rows of several conversational formats share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshtune.data.chat import ChatEncoder
from meshtune.data.conversions import Columns, to_messages
from meshtune.data.encoding import Encoded, Encoder, columns_of
from meshtune.data.pairs import PairEncoder
from meshtune.data.recognise import ambiguous
from meshtune.data.rows import Row, RowProblem, UnusableRow
from meshtune.data.shapes import CONVERSATIONAL, shapes_of
from meshtune.data.text import TextEncoder
from meshtune.data.tokens import TokensEncoder

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

_PAIRS = ("alpaca", "prompt_completion")


def encoder(section: DataSection, row_format: str, tokenizer: Any) -> Encoder:
    """Return the encoder of a format that `detect_format` found for the section.

    Raises DataError where the tokenizer cannot serve it. What the section says of turns applies to rows that have some.
    """
    if row_format == "text":
        return TextEncoder(tokenizer)
    if row_format == "tokens":
        return TokensEncoder(tokenizer)
    if not has_turns(row_format, tokenizer):
        return PairEncoder(tokenizer, row_format)
    chat = ChatEncoder(tokenizer, section.train_on or "all", section.reasoning or "template")
    return ConversationEncoder(chat, row_format, any_other=section.format == "auto")


def has_turns(row_format: str, tokenizer: Any) -> bool:
    """Tell whether rows of a format are learnt by assistant turns."""
    return row_format in CONVERSATIONAL and (row_format not in _PAIRS or bool(tokenizer.chat_template))


class ConversationEncoder:
    """Rows of one conversational format, or with `any_other` of whichever a row's columns tell, as `messages`."""

    def __init__(self, messages: Encoder, row_format: str, any_other: bool) -> None:
        self._messages, self._format, self._any_other = messages, row_format, any_other
        self.seen = messages.seen

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        return self._messages.encode([self._converted(row) for row in rows])

    def warnings(self) -> list[str]:
        """Return what a user should know about the rows encoded so far."""
        return self._messages.warnings()

    def _converted(self, row: Row) -> Row:
        try:
            columns = columns_of(row)
            row_format = self._format_of(columns)
            self.seen["format", row_format] += 1
            return Row(row.name, to_messages(columns, row_format))
        except UnusableRow as unusable:
            return Row(row.name, None, unusable.problem)

    def _format_of(self, columns: Columns) -> str:
        if not self._any_other:
            return self._format
        found = [name for name in shapes_of(columns) if name in CONVERSATIONAL]
        if len(found) > 1:
            raise UnusableRow("columns of several formats", f"the row {ambiguous(found)}")
        return found[0] if found else self._format
