"""Combinations of the `data` section's settings that cannot be meant: of several sources, token files, packing and streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshtune.data.sources import is_hub_id
from meshtune.data.token_paths import is_token_path

if TYPE_CHECKING:
    from meshtune.data.section import DataSection


def combinations(section: DataSection) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for each of them."""
    yield from _token_file_problems(section)
    yield from _source_problems(section)
    yield from _packing_problems(section)
    yield from _stream_problems(section)
    yield from _held_out_problems(section)


def _packing_problems(section: DataSection) -> Iterable[tuple[str, str]]:
    if isinstance(section.packing_window, int) and section.packing_window < 1:
        yield "packing_window", f"is {section.packing_window}; write how many rows are packed together, or `all`"
    for key in ("packing_window", "max_documents_per_pack"):
        if getattr(section, key) is None:
            continue
        if not section.packing:
            yield key, "has no effect without `packing: true`"
        elif _only_token_files(section):
            yield (
                key,
                f"has no effect on {section.token_paths[0]}: token files are cut into sequences, which are all full",
            )


def _stream_problems(section: DataSection) -> Iterable[tuple[str, str]]:
    if not section.streaming:
        if section.shuffle_buffer is not None:
            yield "shuffle_buffer", "has no effect without `streaming: true`"
        return
    if section.packing_window is not None:
        yield "packing_window", "has no effect on a stream: see shuffle_buffer"
    if any(map(is_token_path, section.train_paths)):
        yield "streaming", "is for rows; token files are read where they lie anyway: leave it out"
    elif section.sources and all(source.weight is None for source in section.sources):
        yield "streaming", "takes plain paths, or sources that have a weight each; these have none"
    elif section.sources and section.drop_last:
        yield "drop_last", "has no effect on a stream of several sources: it has no end, and no short batch"


def _held_out_problems(section: DataSection) -> Iterable[tuple[str, str]]:
    size = section.validation_size
    if size is None:
        return
    if section.validation_path is not None:
        yield (
            "validation_size",
            "holds rows out of the training data, but validation_path names some; leave one of them out",
        )
    if isinstance(size, float) and size >= 1:
        yield "validation_size", f"is {size}; write a fraction below 1, or a whole number of rows"
    if section.streaming:
        yield "validation_size", "has no effect on a stream, whose rows are not known before; name a validation_path"
    if any(map(is_token_path, section.train_paths)):
        yield "validation_size", "is for rows; of token files name some in validation_path"


def _source_problems(section: DataSection) -> Iterable[tuple[str, str]]:
    weighted = [source.weight is not None for source in section.sources]
    for number, source in enumerate(section.sources):
        place, hub = f"train_path.{number}", any(is_hub_id(path) for path in source.paths)
        if any(weighted) and not weighted[number]:
            yield place, "has no weight, but another source has one; give all of them a weight, or none"
        for key in ("split", "hub_config"):
            if getattr(source, key) is not None and not hub:
                yield f"{place}.{key}", "has no effect: the path names no hub id"
        for key in ("format", "columns", "row_function"):
            if getattr(source, key) is not None and all(map(is_token_path, source.paths)):
                yield f"{place}.{key}", "has no effect: the path names token files, which have no rows"
        for key, message in section.of_source(source).column_problems():
            if getattr(source, key) is not None:
                yield f"{place}.{key}", message


def _token_file_problems(section: DataSection) -> Iterable[tuple[str, str]]:
    for key in ("token_dtype", "document_separator"):
        if getattr(section, key) is not None and not section.token_paths:
            yield key, "has no effect: no path names a token file (.bin)"
    for key in ("format", "columns", "row_function"):
        if getattr(section, key) not in (None, "auto") and _only_token_files(section):
            yield key, f"has no effect: {section.token_paths[0]} names token files, which have no rows"
    if section.token_paths and section.overlong in ("drop", "error"):
        yield (
            "overlong",
            f"`{section.overlong}` has no effect on {section.token_paths[0]}: token files are cut into sequences",
        )


def _only_token_files(section: DataSection) -> bool:
    return all(map(is_token_path, section.train_paths))
