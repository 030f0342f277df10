"""The encoder of `messages` rows: the model's chat template, and a label mask that holds for any template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.data.encoding import Encoded, Flags, check_unicode, columns_of, or_problem
from meshtune.data.formats import Message, conversation
from meshtune.data.rendered import Rendered, Span
from meshtune.data.rows import Row, RowProblem
from meshtune.data.template import ChatTemplate
from meshtune.data.turns import TurnSpans
from meshtune.errors import DataError

RenderedRow = tuple[str, list[Span], bool]  # the text, its supervised spans, whether anyone but assistants speaks


class ChatEncoder:
    """`messages` rows: the model's chat template, tokenised once, with every assistant turn supervised.

    A token is supervised if any of its characters is, so that a token that holds the border between header
    and answer is learnt. Raises DataError where the tokenizer has no template, or cannot say where its tokens
    stand in the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, without which "
                "the label mask of `messages` cannot be exact: use a fast tokenizer (with tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._turns = TurnSpans()
        self._greedy = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.lstrip or t.rstrip}
        self.seen: Counter[Any] = Counter()

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        rendered = [or_problem(self._render, row) for row in rows]
        tokens = iter(self._tokenize([item[0] for item in rendered if not isinstance(item, RowProblem)]))
        return [item if isinstance(item, RowProblem) else self._encoded(item, *next(tokens)) for item in rendered]

    def warnings(self) -> list[str]:
        """Return a warning if no supervised token is the tokenizer's end of sequence."""
        eos = self._tokenizer.eos_token
        last_tokens = Counter({token: count for (what, token), count in self.seen.items() if what == "last"})
        if eos is None or self.seen["eos", 0] or not last_tokens:
            return []
        usual = self._tokenizer.convert_ids_to_tokens(last_tokens.most_common(1)[0][0])
        return [
            f"the chat template never ends an assistant turn with the tokenizer's end of sequence {eos!r} "
            f"(most turns end with {usual!r}): generation must stop on what the template writes"
        ]

    def _render(self, row: Row) -> RenderedRow:
        asked = conversation(columns_of(row))
        accepted, text = self._template.accepted(asked)
        check_unicode(text)
        rendered = Rendered(self._template, accepted, text)
        spans = [s for turn in self._turns.find(rendered) for s in turn.spans if _learnt(rendered.messages[turn.index])]
        return text, spans, len(rendered.turns) < len(rendered.messages)

    def _tokenize(self, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
        """Return, for each text, its token ids and their [start, end) in characters."""
        if not texts:
            return []
        tokens = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return list(zip(tokens["input_ids"], tokens["offset_mapping"], strict=True))

    def _encoded(self, row: RenderedRow, ids: list[int], offsets: list[Span]) -> Encoded | RowProblem:
        text, spans, has_prompt = row
        input_ids = np.asarray(ids, dtype=np.int32)
        supervised = supervised_tokens(self._without_greed(text, ids, offsets), spans)
        if not supervised.any():
            return RowProblem("no supervised token")
        if has_prompt and supervised.all():
            return RowProblem("the label mask covers the whole row, its prompt too")
        self.seen["last", int(input_ids[supervised][-1])] += 1
        self.seen["eos", 0] += int((input_ids[supervised] == self._tokenizer.eos_token_id).any())
        return Encoded(input_ids, supervised)

    def _without_greed(self, text: str, ids: list[int], offsets: list[Span]) -> NDArray[np.int64]:
        """Return offsets [T, 2] in which a special token that swallows white space around it covers its own
        text.
        """
        array = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        if self._greedy:
            for position in np.flatnonzero(np.isin(ids, list(self._greedy))):
                start, end = array[position]
                at = text.find(self._greedy[ids[position]], start, end)
                if at >= 0:
                    array[position] = at, at + len(self._greedy[ids[position]])
        return array


def _learnt(message: Message) -> bool:
    return message.get("weight") != 0


def supervised_tokens(offsets: NDArray[np.int64], spans: Sequence[Span]) -> Flags:
    """Return [T] bool: which tokens overlap a span. Spans are sorted and disjoint; offsets are [T, 2], in
    characters.

    A token without characters of its own (byte-level tokenizers trim white space off) stands for the gap
    before it.
    """
    if not spans or not len(offsets):
        return np.zeros(len(offsets), dtype=bool)
    starts, ends = np.asarray(spans, dtype=np.int64).T
    low, high = offsets[:, 0].copy(), offsets[:, 1]
    reached = np.concatenate(([0], np.maximum.accumulate(high)[:-1]))
    empty = low >= high
    low[empty] = np.minimum(reached[empty], high[empty])
    point = low >= high  # nothing before it either, as a prefix that the tokenizer inserts
    begun = np.searchsorted(starts, high, side="left")
    begun[point] = np.searchsorted(starts, high[point], side="right")
    return (begun > 0) & (low < ends[np.maximum(begun - 1, 0)])
