"""The encoder of prompts and completions for a tokenizer without a chat template: one text, the completion learnt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtune.data.chat import supervised_tokens
from meshtune.data.conversions import alpaca_turns, prompt_and_completion, strings
from meshtune.data.encoding import Encoded, check_unicode, columns_of, or_problem
from meshtune.data.rows import Row, RowProblem, UnusableRow
from meshtune.errors import DataError

_PREAMBLE = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_WITH_INPUT = ", paired with an input that provides further context"


class PairEncoder:
    """Prompt and completion written one after the other, then one end of sequence; the completion is learnt.

    A token is learnt if any of its characters belongs to the completion, so that one that holds the border is. `alpaca`
    rows get the wording that the Alpaca models were trained with.
    """

    def __init__(self, tokenizer: Any, row_format: str) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, without which the label mask of "
                f"`{row_format}` cannot be exact: use a fast tokenizer (with tokenizer.json)"
            )
        self._tokenizer, self._format = tokenizer, row_format
        self._eos = tokenizer.eos_token_id
        self.seen: Counter[Any] = Counter()
        self._pair = _alpaca_pair if row_format == "alpaca" else _plain_pair

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowProblem]:
        """Return each row's tokens, or why it has none."""
        pairs = [or_problem(self._checked, row) for row in rows]
        texts = ["".join(pair) for pair in pairs if not isinstance(pair, RowProblem)]
        found = self._tokenizer(texts, return_offsets_mapping=True, verbose=False) if texts else {}
        tokens = zip(found.get("input_ids", ()), found.get("offset_mapping", ()), strict=True)
        return [pair if isinstance(pair, RowProblem) else self._encoded(pair, *next(tokens)) for pair in pairs]

    def warnings(self) -> list[str]:
        """Return what is done for want of a template, and a warning if no end of sequence can be learnt."""
        how = "in Alpaca's wording" if self._format == "alpaca" else "one after the other"
        told = [f"the tokenizer has no chat template: prompt and completion are written {how}, as plain text"]
        if self._eos is None:
            told.append("the tokenizer names no end-of-sequence token: the model will not learn where an answer ends")
        return told

    def _checked(self, row: Row) -> tuple[str, str]:
        pair = self._pair(columns_of(row))
        check_unicode("".join(pair))
        return pair

    def _encoded(self, pair: tuple[str, str], ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        border, end = len(pair[0]), len(pair[0]) + len(pair[1])
        supervised = supervised_tokens(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), [(border, end)])
        if self._eos is not None:
            if not ids or ids[-1] != self._eos:
                ids, supervised = [*ids, self._eos], np.append(supervised, True)
            supervised[-1] = True  # one that the tokenizer adds stands nowhere in the text
        return Encoded(np.asarray(ids, dtype=np.int32), supervised)


def _plain_pair(columns: dict[str, Any]) -> tuple[str, str]:
    prompt, completion = prompt_and_completion(columns)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UnusableRow("lists of messages need a chat template, which the tokenizer has not")
    return prompt, completion


def _alpaca_pair(columns: dict[str, Any]) -> tuple[str, str]:
    *history, (_, output) = alpaca_turns(columns)
    if history:
        raise UnusableRow("`history` needs a chat template, which the tokenizer has not")
    system, instruction, given = strings(columns, "system", "instruction", "input")
    preamble = f"{system}\n\n" if system.strip() else _PREAMBLE.format(_WITH_INPUT if given.strip() else "")
    parts = (("Instruction", instruction), ("Input", given))
    asked = "".join(f"### {title}:\n{text}\n\n" for title, text in parts if text.strip())
    return f"{preamble}{asked}### Response:\n", output
