"""From the `data` section and a tokenizer to a TokenDataset: read, encode, cut to length, count, keep on
disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from meshtune.data import store
from meshtune.data.blocks import Block, LineBlock, blocks_of
from meshtune.data.cache_key import cache_key
from meshtune.data.dataset import TokenDataset
from meshtune.data.encode_block import BlockEncoder, EncodedBlock
from meshtune.data.reading import Reading
from meshtune.data.recognise import detect_format
from meshtune.data.report import DataReport
from meshtune.data.sources import FileSource, Source, open_sources
from meshtune.data.workers import default_workers, encode_in_order
from meshtune.errors import DataError
from meshtune.observe.rows import RowProgress

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

# Starting workers costs each of them a second or two: what is done in that time needs none.
_ALONE_S = 3.0


def prepare(
    section: DataSection,
    paths: str | list[str],
    tokenizer: Any,
    max_seq_length: int,
    *,
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    verify_cache: bool = True,
) -> TokenDataset:
    """Return the tokenised documents of `paths`, from the cache if nothing that decides them has changed.

    Args:
        section: the recipe's data section; what concerns reading rows and making tokens of them is read here.
        paths: the training or the validation paths of the section.
        tokenizer: a transformers tokenizer; `messages` need a fast one with a chat template.
        max_seq_length: the longest document, in tokens, resolved (never None).
        split: the split to read of hub ids.
        cache_dir: where to keep the arrays (default: `$MESHTUNE_CACHE/data`, else `~/.cache/meshtune/data`).
        verify_cache: read what is kept as a whole, to see that it is what was written; else compare sizes alone.

    Raises DataError for what `open_sources`, `detect_format` and the encoder refuse, for an overlong row under
    `overlong: error`, when no row can be used, when more cannot than `max_unusable` allows, and when no row has a column
    that `columns` names. Several processes may call it at once; each then does the work.
    """
    sources = open_sources(paths, split, section.hub_config, Reading.of(section))
    folder = store.cache_folder(cache_dir) / cache_key(section, sources, tokenizer, max_seq_length)
    cached = store.load(folder, whole=verify_cache, say=_tell_of_damage)
    if cached is not None:
        check_share(section, cached.report)
        return cached
    encoder, report = _start(section, sources, tokenizer, max_seq_length)
    seen: Counter[Any] = Counter()
    met: set[str] = set()
    with store.Writer(folder) as writer, RowProgress(report.named) as progress:
        for block in _encoded(encoder, sources, section.num_workers):
            writer.write(block.input_ids, block.supervised, block.lengths)
            report.add(block.report)
            seen.update(block.seen)
            met |= block.met
            progress.update(report.rows_read, report.tokens)
        _finish(report, writer.lengths, [*encoder.warnings(seen), *_left_aside(sources)])
        check_share(section, report)
        _check_columns(sources, met)
        return writer.publish(report)


def validation_setting(name: str) -> str:
    """Return the setting that names a validation set."""
    return f"data.validation_path.{name}" if name else "data.validation_path"


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Say of a DataError raised inside which setting named the data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{setting}: {error}") from error


def preview(
    section: DataSection,
    paths: str | list[str],
    tokenizer: Any,
    max_seq_length: int,
    *,
    split: str = "train",
    rows: int = 64,
) -> DataReport:
    """Return the report of the first rows alone, writing nothing: what can be known of the data in a second.

    Raises DataError as `prepare` does, save that unusable first rows are only counted.
    """
    sources = open_sources(paths, split, section.hub_config, Reading.of(section))
    return preview_of(section, sources, tokenizer, max_seq_length, rows=rows)


def preview_of(
    section: DataSection, sources: Sequence[Source], tokenizer: Any, max_seq_length: int, *, rows: int = 64
) -> DataReport:
    """Return the report of the first rows of sources that are open; see `preview`."""
    encoder, report = _start(section, sources, tokenizer, max_seq_length)
    encoded = encoder.rows(row for source in sources for row in islice(source.rows(), rows))
    report.add(encoded.report)
    if encoded.lengths:
        _finish(report, encoded.lengths, encoder.warnings(encoded.seen))
    return report


def _start(
    section: DataSection, sources: Sequence[Source], tokenizer: Any, max_seq_length: int
) -> tuple[BlockEncoder, DataReport]:
    row_format = detect_format(sources, section.format)
    report = DataReport([source.name for source in sources], row_format, max_seq_length)
    return BlockEncoder(section, row_format, tokenizer, max_seq_length), report


def _encoded(encoder: BlockEncoder, sources: Sequence[Source], workers: int | None) -> Iterator[EncodedBlock]:
    """Yield all blocks of the sources in order, the same whoever works on them: this process, while there is little to do
    and nobody says how many `workers` there are to be, then one process for each core.
    """
    blocks = (block for source in sources for block in blocks_of(source))
    first = next(blocks, None)
    if first is None:
        return
    started = time.monotonic()
    yield encoder.warm_up(first)
    expected = (time.monotonic() - started) / _share(first, sources)
    count = workers or default_workers()
    for block in blocks:
        if count > 1 and (workers is not None or max(expected / 2, time.monotonic() - started) > _ALONE_S):
            yield from encode_in_order(encoder, chain([block], blocks), count)
            return
        yield encoder.encode(block)


def _share(block: Block, sources: Sequence[Source]) -> float:
    """Return which share of all that is to be read a block is, 0 to 1; 1 where that cannot be told."""
    if not isinstance(block, LineBlock) or not block.size:
        return 1.0
    return block.size / sum(source.path.stat().st_size for source in sources if isinstance(source, FileSource))


def _tell_of_damage(what: str) -> None:
    print(f"data        the cache is damaged and made anew: {what}", file=sys.stderr, flush=True)


def _left_aside(sources: Sequence[Source]) -> list[str]:
    """Return what is said of files that lie in a folder of data and are none."""
    found = [source for source in sources if isinstance(source, FileSource) and source.left_aside]
    return [
        f"left aside, no data by their names: {', '.join(source.left_aside)} (beside {source.name})" for source in found
    ]


def _finish(report: DataReport, lengths: Sequence[int], warnings: list[str]) -> None:
    if not lengths:
        reasons = report.unusable_lines()
        if report.dropped_overlong:
            reasons.append(f"{report.dropped_overlong:,} rows longer than max_seq_length {report.max_seq_length:,}")
        told = "\n  ".join(reasons or ["there is no row"])
        raise DataError(f"{report.named}: no row can be used to train on:\n  {told}")
    report.measure(lengths)
    report.warnings = warnings


def check_share(section: DataSection, report: DataReport) -> None:
    """Raise DataError where more rows are unusable than the section allows."""
    asked = report.rows_read - report.left_out
    if report.rows_unusable > section.max_unusable * asked:
        told = "\n  ".join(report.unusable_lines())
        raise DataError(
            f"{report.named}: {report.rows_unusable:,} of {asked:,} rows cannot be used, more than "
            f"data.max_unusable ({section.max_unusable:g}) allows:\n  {told}"
        )


def _check_columns(sources: Sequence[Source], met: set[str]) -> None:
    """Raise DataError where `data.columns` names a column that no row has."""
    columns = sources[0].reading.columns
    if missed := [name for name in columns if name not in met]:
        told = ", ".join(f"`{columns[name]}` (for `{name}`)" for name in missed)
        raise DataError(f"{', '.join(s.name for s in sources)}: no row has the column {told} that data.columns names")
