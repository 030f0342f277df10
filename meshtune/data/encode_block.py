"""From a block of rows to tokens that are cut to length and counted: all that preparation does between two disks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshtune.data.blocks import Block
from meshtune.data.encoders import encoder
from meshtune.data.encoding import Encoded, Encoder, Flags, Tokens
from meshtune.data.report import DataReport
from meshtune.data.rows import Row, RowProblem
from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

_ROWS_AT_ONCE = 256

Item = TypeVar("Item")


@dataclass
class EncodedBlock:
    """The documents of a block in flat arrays: `input_ids` [T] int32, `supervised` [T] bool, `lengths` in tokens; what was
    counted (`report`), what the encoder has `seen`, and which of `data.columns` have occurred (`met`).
    """

    input_ids: Tokens
    supervised: Flags
    lengths: list[int]
    report: DataReport
    seen: Counter[Any] = field(default_factory=Counter)
    met: set[str] = field(default_factory=set)


class BlockEncoder:
    """Encodes blocks, each from the state in which the encoder was after `warm_up`: what it learns of a template on the way
    saves time, and must not make a row depend on the rows before it.
    """

    def __init__(self, section: DataSection, row_format: str, tokenizer: Any, max_seq_length: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder(section, row_format, tokenizer)
        self._overlong, self._longest = section.overlong, max_seq_length

    def warm_up(self, block: Block) -> EncodedBlock:
        """Encode a block, and keep what the encoder learns from it for all blocks after."""
        return self._block(self._encoder, block)

    def encode(self, block: Block) -> EncodedBlock:
        """Encode a block. Raises DataError for an overlong row where those are errors."""
        return self._block(copy.deepcopy(self._encoder, {id(self._tokenizer): self._tokenizer}), block)

    def rows(self, rows: Iterable[Row]) -> EncodedBlock:
        """Encode some rows; see `encode`."""
        return self._rows(self._encoder, rows)

    def warnings(self, seen: Counter[Any]) -> list[str]:
        """Return what a user should know about rows in which encoders have seen this."""
        self._encoder.seen.clear()
        self._encoder.seen.update(seen)
        return self._encoder.warnings()

    def _block(self, rows_encoder: Encoder, block: Block) -> EncodedBlock:
        encoded = self._rows(rows_encoder, block.rows())
        encoded.met = set(block.reading.met)
        return encoded

    def _rows(self, rows_encoder: Encoder, rows: Iterable[Row]) -> EncodedBlock:
        rows_encoder.seen.clear()
        report = DataReport(max_seq_length=self._longest)
        documents = [d for part in _batched(rows, _ROWS_AT_ONCE) for d in self._documents(rows_encoder, part, report)]
        ids = [document.input_ids for document in documents]
        flags = [document.supervised for document in documents]
        report.format = ", ".join(name for what, name in rows_encoder.seen if what == "format")
        report.documents, report.tokens = len(documents), sum(map(len, ids))
        report.supervised_tokens = sum(int(np.count_nonzero(flag[1:])) for flag in flags)
        return EncodedBlock(
            np.concatenate([np.zeros(0, dtype=np.int32), *ids], dtype=np.int32),
            np.concatenate([np.zeros(0, dtype=bool), *flags]),
            [len(document) for document in ids],
            report,
            Counter(rows_encoder.seen),
        )

    def _documents(self, rows_encoder: Encoder, rows: list[Row], report: DataReport) -> Iterator[Encoded]:
        """Yield the documents of some rows, none longer than the maximum, counting what happens."""
        for row, encoded in zip(rows, rows_encoder.encode(rows), strict=True):
            report.rows_read += 1
            if isinstance(encoded, RowProblem):
                report.reject(row.name, encoded)
            else:
                yield from _kept(row.name, encoded, self._overlong, report)


def _kept(name: str, row: Encoded, overlong: str, report: DataReport) -> list[Encoded]:
    """Return the documents that a row becomes, each within the maximum length and with a target."""
    longest, length = report.max_seq_length, len(row.input_ids)
    windows = _windows(name, row, overlong, report) if length > longest else [row]
    documents = [window for window in windows if window.supervised[1:].any()]
    report.tokens_left_out += length - sum(len(document.input_ids) for document in documents)
    if documents:
        report.rows_used += 1
        report.truncated += length > longest and overlong == "truncate"
        report.split += length > longest and overlong == "split"
        report.windows_without_target += len(windows) - len(documents)
    elif windows:
        within = " within max_seq_length" if length > longest else ""
        report.reject(name, RowProblem(f"no supervised token to predict{within}", f"{length} tokens"))
    return documents


def _windows(name: str, row: Encoded, overlong: str, report: DataReport) -> list[Encoded]:
    """Return the parts of an overlong row; after a split, a part starts without what came before it."""
    longest, length = report.max_seq_length, len(row.input_ids)
    if overlong == "error":
        raise DataError(
            f"{name}: has {length} tokens, but max_seq_length is {longest} and overlong is `error`; raise "
            "max_seq_length, or set overlong to truncate, drop or split"
        )
    if overlong == "drop":
        report.dropped_overlong += 1
        return []
    starts = range(0, length, longest) if overlong == "split" else range(1)
    return [Encoded(row.input_ids[s : s + longest], row.supervised[s : s + longest]) for s in starts]


def _batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
