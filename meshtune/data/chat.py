"""The encoder of `messages` rows: the model's chat template, and a label mask that holds for any template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshtune.data.encoding import Encoded, Flags, Tokens, check_unicode, columns_of, or_problem
from meshtune.data.formats import Conversation, conversation
from meshtune.data.glue import Glue, is_plain
from meshtune.data.reasoning import Edit, applied, left_out, moved, restored, spoken
from meshtune.data.rendered import Rendered, Span
from meshtune.data.rows import Row, RowProblem
from meshtune.data.selection import TrainOn, part_span, select, without
from meshtune.data.template import ChatTemplate, attempt
from meshtune.data.token_bytes import TokenBytes
from meshtune.data.turns import Turn, TurnSpans
from meshtune.errors import DataError

Reasoning = Literal["template", "keep"]
RenderedRow = tuple[str, list[Span], bool]  # the text, its supervised spans, whether anyone but assistants speaks


class ChatEncoder:
    """`messages` rows: the model's chat template, tokenised once, with every assistant turn supervised.

    `train_on`: `all` assistant turns, or the `last` alone; flags of rows take away from either. `reasoning`: what
    the `template` shows of it, or `keep` that of every turn.

    A token is supervised if any of its characters is, so that a token that holds the border between header
    and answer is learnt. Raises DataError where the tokenizer has no template, or cannot say where its tokens
    stand in the text.
    """

    def __init__(self, tokenizer: Any, train_on: TrainOn = "all", reasoning: Reasoning = "template") -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, without which "
                "the label mask of `messages` cannot be exact: use a fast tokenizer (with tokenizer.json)"
            )
        self._tokenizer, self._train_on, self._reasoning = tokenizer, train_on, reasoning
        self._template = ChatTemplate(tokenizer)
        self._turns = TurnSpans()
        self._glue = Glue(self._template)
        self._bytes = TokenBytes(tokenizer.backend_tokenizer)
        self._greedy = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.lstrip or t.rstrip}
        self.seen: Counter[Any] = Counter()

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        rendered = [or_problem(self._render, row) for row in rows]
        tokens = iter(self._tokenize([item[0] for item in rendered if not isinstance(item, RowProblem)]))
        return [item if isinstance(item, RowProblem) else self._encoded(item, next(tokens)) for item in rendered]

    def warnings(self) -> list[str]:
        """Return what the template did that a user may not expect: no end of sequence, reasoning left out."""
        return [*self._of_the_end(), *self._of_reasoning()]

    def _of_the_end(self) -> list[str]:
        eos = self._tokenizer.eos_token
        last_tokens = Counter({token: count for (what, token), count in self.seen.items() if what == "last"})
        if eos is None or self.seen["eos", 0] or not last_tokens:
            return []
        most = last_tokens.most_common(1)[0][0]
        if most not in self._tokenizer.added_tokens_decoder:
            return [
                "the chat template ends assistant turns with no token of their own: the model does not learn where to "
                "stop; generation must stop on what begins the next turn"
            ]
        usual = self._tokenizer.convert_ids_to_tokens(most)
        return [
            f"the chat template never ends an assistant turn with the tokenizer's end of sequence {eos!r} "
            f"(most turns end with {usual!r}): generation must stop on what the template writes"
        ]

    def _of_reasoning(self) -> list[str]:
        count = self.seen["reasoning left out", 0]
        if not count:
            return []
        return [f"the chat template leaves out the reasoning of {count:,} turns; `data.reasoning: keep` keeps it"]

    def _render(self, row: Row) -> RenderedRow:
        columns = columns_of(row)
        asked, selection = select(given := conversation(columns), columns, self._train_on)
        accepted, text, turns = self._aligned(asked)
        rendered = Rendered(self._template, accepted, text)
        silent = [part_span(rendered, given, *part) for part in selection.parts_left_out]
        edits = self._reasoning_put_back(rendered, turns)
        spans = [s for turn in turns if turn.index in selection.messages for s in spoken(turn, edits)]
        spans = without(spans, [moved(span, edits) for span in silent])
        return applied(text, edits), spans, len(rendered.turns) < len(rendered.messages)

    def _aligned(self, asked: Conversation) -> tuple[Conversation, str, list[Turn]]:
        text = attempt(self._template.render_plain, asked.messages) if is_plain(asked) else None
        turns = self._glue.turns(asked, text) if text is not None else None
        if text is not None and turns is not None:
            check_unicode(text)
            return asked, text, turns
        accepted, text = self._template.accepted(asked, text)
        check_unicode(text)
        turns = self._turns.find(Rendered(self._template, accepted, text))
        self._glue.learn(accepted, text, turns)
        return accepted, text, turns

    def _reasoning_put_back(self, rendered: Rendered, turns: list[Turn]) -> list[Edit]:
        silent = left_out(rendered, turns)
        if self._reasoning == "template":
            self.seen["reasoning left out", 0] += len(silent)
            return []
        return [restored(self._turns, rendered, turn) for turn in silent]

    def _tokenize(self, texts: list[str]) -> list[Any]:
        """Return the tokenizer's own encoding of each text, special tokens and limits left to the template."""
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(self._tokenizer, "split_special_tokens", False))
        encode = backend.encode_batch_fast if self._bytes.known else backend.encode_batch
        return list(encode(texts, add_special_tokens=False))

    def _encoded(self, row: RenderedRow, tokens: Any) -> Encoded | RowProblem:
        text, spans, has_prompt = row
        input_ids = np.asarray(tokens.ids, dtype=np.int32)
        supervised = self._supervised(text, spans, input_ids, tokens)
        count = np.count_nonzero(supervised)
        if not count:
            return RowProblem("no supervised token")
        if has_prompt and count == len(supervised):
            return RowProblem("the label mask covers the whole row, its prompt too")
        self.seen["last", int(input_ids[np.flatnonzero(supervised)[-1]])] += 1
        self.seen["eos", 0] += int((input_ids[supervised] == self._tokenizer.eos_token_id).any())
        return Encoded(input_ids, supervised)

    def _supervised(self, text: str, spans: list[Span], input_ids: Tokens, tokens: Any) -> Flags:
        flags = self._bytes.supervised(text, input_ids, spans) if self._bytes.known else None
        if flags is not None:
            return flags
        if self._bytes.known:
            tokens = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return supervised_tokens(self._without_greed(text, tokens.ids, tokens.offsets), spans)

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
