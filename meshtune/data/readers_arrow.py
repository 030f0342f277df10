"""Readers of columnar data. Rows are as they were written: see `arrow_values` for what the columns add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtune.data.arrow_values import row_cleaner, without_nulls
from meshtune.data.rows import Row
from meshtune.errors import DataError

_ROWS_AT_ONCE = 512
_FILE_MAGIC = b"ARROW1"


def read_parquet(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, named `file:row N`, N from 0; of `columns` only, if it has any of them.

    Raises DataError when the file is not Parquet or damaged.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = _chosen(columns, file.schema_arrow.names)
            yield from _rows(file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=chosen), name)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Parquet: {error}") from error


def read_arrow(path: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of an Arrow IPC file or stream, which is mapped into memory; see `read_parquet`."""
    import pyarrow

    try:
        with path.open("rb") as file:
            is_stream = file.read(len(_FILE_MAGIC)) != _FILE_MAGIC
        with pyarrow.memory_map(str(path)) as mapped:
            yield from _rows(_batches(mapped, is_stream, columns), name)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Arrow: {error}") from error


def read_dataset(dataset: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a loaded `datasets.Dataset`, named `name:row N`, from 0; see `read_parquet`."""
    chosen = _chosen(columns, dataset.column_names)
    read = dataset if chosen is None else dataset.select_columns(chosen)
    yield from _rows(read.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE), name)


def read_stream(dataset: Any, name: str) -> Iterator[Row]:
    """Yield the rows of a `datasets.IterableDataset`, named as those of `read_dataset`; its columns need not be known."""
    features = dataset.features
    clean = without_nulls if features is None else row_cleaner(features.arrow_schema, decoded=True)
    for number, value in enumerate(dataset):
        yield Row(f"{name}:row {number}", clean(value))


def _batches(mapped: Any, is_stream: bool, columns: Sequence[str] | None) -> Iterator[Any]:
    import pyarrow

    reader = pyarrow.ipc.open_stream(mapped) if is_stream else pyarrow.ipc.open_file(mapped)
    chosen = _chosen(columns, reader.schema.names)
    batches = reader if is_stream else (reader.get_batch(index) for index in range(reader.num_record_batches))
    for batch in batches:
        table = batch if chosen is None else batch.select(chosen)
        for start in range(0, table.num_rows, _ROWS_AT_ONCE):
            yield table.slice(start, _ROWS_AT_ONCE)


def _chosen(columns: Sequence[str] | None, found: Sequence[str]) -> list[str] | None:
    """Return those of the wanted columns that there are; None, for all, where there is none: errors name what is there."""
    return [column for column in columns or () if column in found] or None


def _rows(batches: Iterator[Any], name: str) -> Iterator[Row]:
    start, clean = 0, None
    for batch in batches:
        clean = clean or row_cleaner(batch.schema)
        for number, value in enumerate(batch.to_pylist(), start=start):
            yield Row(f"{name}:row {number}", clean(value))
        start += batch.num_rows
