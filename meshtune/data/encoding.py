"""Rows to tokens with a flag for each token: supervised or not. One encoder for each row format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshtune.data.alignment import Rendered, Span
from meshtune.data.formats import RowFormat, conversation, plain_text
from meshtune.data.rows import RowProblem, Row, UnusableRow
from meshtune.data.template import ChatTemplate
from meshtune.data.turns import TurnSpans
from meshtune.errors import DataError

Tokens = NDArray[np.int32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row's tokens: `input_ids` [T] int32 and `supervised` [T] bool, before any cut to the maximum length."""

    input_ids: Tokens
    supervised: Flags


class Encoder(Protocol):
    """Turns rows into tokens, in batches, each row on its own."""

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return, for each row in order, its tokens or the reason why there are none."""
        ...

    def warnings(self) -> list[str]:
        """Return what a user should know about the rows encoded so far."""
        ...


def encoder(row_format: RowFormat, tokenizer: Any) -> Encoder:
    """Return the encoder of a row format. Raises DataError where the tokenizer cannot serve it."""
    return ChatEncoder(tokenizer) if row_format == "messages" else TextEncoder(tokenizer)


class TextEncoder:
    """`text` rows: the tokenizer's own special tokens, then one end of sequence; every token is supervised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        texts = [_or_problem(_checked_text, row) for row in rows]
        usable = [text for text in texts if isinstance(text, str)]
        ids = iter(
            self._tokenizer(usable, return_attention_mask=False, verbose=False)["input_ids"] if usable else []
        )
        return [text if isinstance(text, RowProblem) else self._encoded(next(ids)) for text in texts]

    def warnings(self) -> list[str]:
        """Return a warning if texts get no end of sequence, because the tokenizer names none."""
        if self._eos is None:
            return [
                "the tokenizer names no end-of-sequence token: the model will not learn where a text ends"
            ]
        return []

    def _encoded(self, ids: list[int]) -> Encoded:
        if self._eos is not None and (not ids or ids[-1] != self._eos):
            ids = [*ids, self._eos]
        return Encoded(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))


class ChatEncoder:
    """`messages` rows: the model's chat template, tokenised once, with every assistant turn supervised.

    A token is supervised if any of its characters is, so that a token that holds the border between header and answer
    is learnt. Raises DataError where the tokenizer has no template, or cannot say where its tokens stand in the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, without which the label mask of "
                "`messages` cannot be exact: use a fast tokenizer (a folder with tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._turns = TurnSpans()
        self._greedy = {
            i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.lstrip or t.rstrip
        }
        self._last_supervised: Counter[int] = Counter()
        self._eos_seen = False

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        rendered = [_or_problem(self._render, row) for row in rows]
        texts = [item[0] for item in rendered if not isinstance(item, RowProblem)]
        tokens = (
            self._tokenizer(
                texts,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            if texts
            else {"input_ids": [], "offset_mapping": []}
        )
        pairs = iter(zip(tokens["input_ids"], tokens["offset_mapping"], strict=True))
        return [
            item if isinstance(item, RowProblem) else self._encoded(*item, *next(pairs)) for item in rendered
        ]

    def warnings(self) -> list[str]:
        """Return a warning if no supervised token is the tokenizer's end of sequence."""
        eos = self._tokenizer.eos_token
        if eos is None or self._eos_seen or not self._last_supervised:
            return []
        usual = self._tokenizer.convert_ids_to_tokens(self._last_supervised.most_common(1)[0][0])
        return [
            f"the chat template never ends an assistant turn with the tokenizer's end of sequence {eos!r} (most turns "
            f"end with {usual!r}): generation must stop on what the template writes"
        ]

    def _render(self, row: Row) -> tuple[str, list[Span], bool]:
        asked = conversation(_columns(row))
        accepted, text = self._template.accepted(asked)
        _check_unicode(text)
        rendered = Rendered(self._template, accepted, text)
        spans = self._turns.find(rendered)
        return text, spans, len(rendered.turns) < len(rendered.messages)

    def _encoded(
        self, text: str, spans: list[Span], has_prompt: bool, ids: list[int], offsets: list[Span]
    ) -> Encoded | RowProblem:
        input_ids = np.asarray(ids, dtype=np.int32)
        supervised = supervised_tokens(self._without_greed(text, ids, offsets), spans)
        if not supervised.any():
            return RowProblem("no supervised token")
        if has_prompt and supervised.all():
            return RowProblem("the label mask covers the whole row, its prompt too")
        self._last_supervised[int(input_ids[supervised][-1])] += 1
        self._eos_seen = self._eos_seen or bool((input_ids[supervised] == self._tokenizer.eos_token_id).any())
        return Encoded(input_ids, supervised)

    def _without_greed(self, text: str, ids: list[int], offsets: list[Span]) -> NDArray[np.int64]:
        """Return offsets [T, 2] in which a special token that swallows white space around it covers its own text."""
        array = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        if self._greedy:
            for position in np.flatnonzero(np.isin(ids, list(self._greedy))):
                start, end = array[position]
                at = text.find(self._greedy[ids[position]], start, end)
                if at >= 0:
                    array[position] = at, at + len(self._greedy[ids[position]])
        return array


def supervised_tokens(offsets: NDArray[np.int64], spans: Sequence[Span]) -> Flags:
    """Return [T] bool: which tokens overlap a span. Spans are sorted and disjoint; offsets are [T, 2], in characters.

    A token without characters of its own (byte-level tokenizers trim white space off) stands for the gap before it.
    """
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=bool)
    starts, ends = np.asarray(spans, dtype=np.int64).T
    low, high = offsets[:, 0].copy(), offsets[:, 1]
    reached = np.concatenate(([0], np.maximum.accumulate(high)[:-1]))
    empty = low >= high
    low[empty] = np.minimum(reached[empty], high[empty])
    point = low >= high  # nothing before it either, as a prefix that the tokenizer inserts
    before = (
        np.where(
            point, np.searchsorted(starts, high, side="right"), np.searchsorted(starts, high, side="left")
        )
        - 1
    )
    return (before >= 0) & (low < ends[np.maximum(before, 0)])


def _columns(row: Row) -> dict[str, Any]:
    if row.columns is None:
        problem = row.problem or RowProblem("unreadable")
        raise UnusableRow(problem.reason, problem.detail)
    return row.columns


def _checked_text(row: Row) -> str:
    text = plain_text(_columns(row))
    _check_unicode(text)
    return text


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRow("the text holds half a surrogate pair", f"character {error.start}") from error


def _or_problem(make: Any, row: Row) -> Any:
    try:
        return make(row)
    except UnusableRow as unusable:
        return unusable.problem
