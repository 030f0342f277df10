"""From the `data` section and a tokenizer to a TokenDataset: read, encode, cut to length, count, keep on
disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from meshtune.data import store
from meshtune.data.cache_key import cache_key
from meshtune.data.dataset import TokenDataset
from meshtune.data.encoders import encoder
from meshtune.data.encoding import Encoded, Encoder
from meshtune.data.reading import Reading
from meshtune.data.recognise import detect_format
from meshtune.data.report import DataReport
from meshtune.data.rows import Row, RowProblem
from meshtune.data.section import as_list
from meshtune.data.sources import Source, open_sources
from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

_ROWS_AT_ONCE = 256

Item = TypeVar("Item")


def prepare(
    section: DataSection,
    paths: str | list[str],
    tokenizer: Any,
    max_seq_length: int,
    *,
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenDataset:
    """Return the tokenised documents of `paths`, from the cache if nothing that decides them has changed.

    Args:
        section: the recipe's data section; what concerns reading rows and making tokens of them is read here.
        paths: the training or the validation paths of the section.
        tokenizer: a transformers tokenizer; `messages` need a fast one with a chat template.
        max_seq_length: the longest document, in tokens, resolved (never None).
        split: the split to read of hub ids.
        cache_dir: where to keep the arrays (default: `$MESHTUNE_CACHE/data`, else `~/.cache/meshtune/data`).

    Raises DataError for what `open_sources`, `detect_format` and the encoder refuse, for an overlong row under
    `overlong: error`, when no row can be used, when more cannot than `max_unusable` allows, and when no row has a column
    that `columns` names. Several processes may call it at once; each then does the work.
    """
    sources = open_sources(paths, split, section.hub_config, Reading.of(section))
    folder = store.cache_folder(cache_dir) / cache_key(section, sources, tokenizer, max_seq_length)
    cached = store.load(folder)
    if cached is not None:
        _check_share(section, cached.report)
        return cached
    row_format = detect_format(sources, section.format)
    rows_encoder = encoder(section, row_format, tokenizer)
    report = _new_report(sources, row_format, max_seq_length)
    rows = (row for source in sources for row in source.rows())
    with store.Writer(folder) as writer:
        for documents in _documents(rows, rows_encoder, section.overlong, report):
            writer.append(documents)
        _finish(report, writer.lengths, rows_encoder)
        _check_share(section, report)
        _check_columns(sources)
        return writer.publish(report)


def prepare_training(
    section: DataSection, tokenizer: Any, max_seq_length: int, cache_dir: str | os.PathLike[str] | None = None
) -> TokenDataset:
    """Return the prepared training data of a section; see `prepare`."""
    split = section.train_split or "train"
    with naming("data.train_path"):
        return prepare(
            section, as_list(section.train_path), tokenizer, max_seq_length, split=split, cache_dir=cache_dir
        )


def prepare_validation(
    section: DataSection, tokenizer: Any, max_seq_length: int, cache_dir: str | os.PathLike[str] | None = None
) -> dict[str, TokenDataset]:
    """Return the prepared validation sets of a section by name, one alone under ""; see `prepare`."""
    split, prepared = section.validation_split or "validation", {}
    for name, paths in section.validation_sets.items():
        with naming(validation_setting(name)):
            prepared[name] = prepare(section, paths, tokenizer, max_seq_length, split=split, cache_dir=cache_dir)
    return prepared


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
    row_format = detect_format(sources, section.format)
    rows_encoder = encoder(section, row_format, tokenizer)
    report = _new_report(sources, row_format, max_seq_length)
    first = (row for source in sources for row in islice(source.rows(), rows))
    lengths = [len(d.input_ids) for part in _documents(first, rows_encoder, section.overlong, report) for d in part]
    if lengths:
        _finish(report, lengths, rows_encoder)
    return report


def _new_report(sources: Sequence[Source], row_format: str, max_seq_length: int) -> DataReport:
    return DataReport([source.name for source in sources], row_format, max_seq_length)


def _documents(
    rows: Iterable[Row], rows_encoder: Encoder, overlong: str, report: DataReport
) -> Iterator[list[Encoded]]:
    """Yield the documents of some rows at a time, none longer than the report's maximum, counting what
    happens.
    """
    for part in _batched(rows, _ROWS_AT_ONCE):
        documents = []
        for row, encoded in zip(part, rows_encoder.encode(part), strict=True):
            report.rows_read += 1
            if isinstance(encoded, RowProblem):
                report.reject(row.name, encoded)
            else:
                documents += _kept(row.name, encoded, overlong, report)
        report.documents += len(documents)
        report.tokens += sum(len(document.input_ids) for document in documents)
        report.supervised_tokens += sum(int(document.supervised[1:].sum()) for document in documents)
        yield documents


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


def _finish(report: DataReport, lengths: Sequence[int], rows_encoder: Encoder) -> None:
    if not lengths:
        reasons = report.unusable_lines()
        if report.dropped_overlong:
            reasons.append(f"{report.dropped_overlong:,} rows longer than max_seq_length {report.max_seq_length:,}")
        told = "\n  ".join(reasons or ["there is no row"])
        raise DataError(f"{', '.join(report.sources)}: no row can be used to train on:\n  {told}")
    report.measure(lengths)
    report.warnings = rows_encoder.warnings()


def _check_share(section: DataSection, report: DataReport) -> None:
    """Raise DataError where more rows are unusable than the section allows."""
    asked = report.rows_read - report.left_out
    if report.rows_unusable > section.max_unusable * asked:
        told = "\n  ".join(report.unusable_lines())
        raise DataError(
            f"{', '.join(report.sources)}: {report.rows_unusable:,} of {asked:,} rows cannot be used, more than "
            f"data.max_unusable ({section.max_unusable:g}) allows:\n  {told}"
        )


def _check_columns(sources: Sequence[Source]) -> None:
    """Raise DataError where `data.columns` names a column that no row has."""
    reading = sources[0].reading
    if missed := reading.missed():
        told = ", ".join(f"`{reading.columns[name]}` (for `{name}`)" for name in missed)
        raise DataError(f"{', '.join(s.name for s in sources)}: no row has the column {told} that data.columns names")


def _batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
