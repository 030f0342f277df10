"""Rows that are prepared while training goes on: block by block, each block shuffled and packed on its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.data.cache_key import cache_key
from meshtune.data.encode_block import BlockEncoder
from meshtune.data.prepare import check_share
from meshtune.data.reading import Reading
from meshtune.data.recognise import detect_format
from meshtune.data.report import DataReport
from meshtune.data.stream_blocks import Blocks, Builder, Follower
from meshtune.data.stream_encoding import Place, Reader, StreamEncoder, processes_for
from meshtune.data.stream_sources import streamed_sources
from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

DEFAULT_BUFFER = 4096


@dataclass(frozen=True)
class Streaming:
    """Where the ranks of a node share blocks, whether this rank makes them, and whether it says what it counts. Of several
    streams, `share` is this one's part of the rows.
    """

    folder: Path
    leads: bool = True
    says: bool = True
    share: float = 1.0

    def part(self, number: int, share: float) -> Streaming:
        """The place of one of several streams."""
        return replace(self, folder=self.folder.with_name(f"{self.folder.name}-{number}"), share=share)


@dataclass
class StreamReport(DataReport):
    """What has been read so far."""

    rows_at_once: int = 0

    def summary(self) -> list[str]:
        """Return the report as lines of text."""
        first, *rest = super().summary()
        return [f"streamed, {self.rows_at_once:,} rows at a time; so far {first}", *rest]


class Stream:
    """The training rows of a section as a stream. `fingerprint` is a hash of samples of the files and of all settings that
    decide blocks and tokens. What is known of lengths is known of the first block.
    """

    def __init__(
        self, section: DataSection, paths: Sequence[str], tokenizer: Any, longest: int, where: Streaming
    ) -> None:
        """Raises DataError for what preparation refuses of the first block, or where that has no row to train on."""
        split = section.train_split or "train"
        sources = streamed_sources(list(paths), split, section.hub_config, Reading.of(section))
        self.rows_at_once = section.shuffle_buffer or DEFAULT_BUFFER
        self.fingerprint = _fingerprint(cache_key(section, sources, tokenizer, longest), self.rows_at_once)
        row_format = detect_format(sources, section.format)
        self.report = StreamReport([s.name for s in sources], row_format, longest, rows_at_once=self.rows_at_once)
        self._section, self._says = section, where.says
        self.blocks: Blocks = Follower(where.folder)
        if where.leads:
            encoder = StreamEncoder(
                Reader(sources, self.rows_at_once),
                BlockEncoder(section, row_format, tokenizer, longest),
                processes_for(section.num_workers, where.share),
            )
            self.blocks = Builder(encoder, where.folder, self.report, self._told)

    @cached_property
    def first(self) -> Any:
        """The documents of the first block that has any."""
        number = 0
        while not (found := self.blocks.get((0, number))).end:
            if found.documents is not None:
                return found.documents
            number += 1
        told = "\n  ".join(self.report.unusable_lines() or ["there is no row"])
        raise DataError(f"{self.report.named}: no row can be used to train on:\n  {told}")

    @property
    def mean_length(self) -> float:
        """Tokens of the document in which the average token stands, in the first block."""
        return self.first.mean_length

    @property
    def supervised_share(self) -> float:
        """Targets per token, 0 to 1, in the first block."""
        return self.first.supervised_share

    def close(self) -> None:
        """Stop making blocks, and remove them."""
        self.blocks.close()

    def _told(self, place: Place, block: DataReport) -> None:
        check_share(self._section, self.report)
        lines = block.unusable_lines() if place[0] == 0 else []
        if self._says and lines:
            print(
                "\n".join(f"data        rows {place[1] * self.rows_at_once:,} and on: {line}" for line in lines),
                flush=True,
            )


def _fingerprint(*facts: Any) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
