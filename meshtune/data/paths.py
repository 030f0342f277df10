"""From what a user names to the files that are read: a file, a folder or a pattern, in an order that is always the same."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshtune.data import readers, readers_arrow, readers_csv
from meshtune.data.compressed import data_suffix, is_compressed
from meshtune.errors import DataError

READERS = {
    ".jsonl": readers.read_json_lines,
    ".ndjson": readers.read_json_lines,
    ".json": readers.read_json,
    ".csv": readers_csv.read_csv,
    ".tsv": readers_csv.read_csv,
    ".parquet": readers_arrow.read_parquet,
    ".arrow": readers_arrow.read_arrow,
    ".feather": readers_arrow.read_arrow,
}
WANTED = (
    "wanted: a .jsonl, .json, .csv, .tsv, .parquet or .arrow file (the text ones also as .gz, .bz2, .xz or .zst), a folder "
    "or a pattern of such files, a list of them, or a hub id such as org/name"
)

_COLUMNAR = (".parquet", ".arrow", ".feather")
_MARKS = re.compile(r"[*?\[]")
_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip


@dataclass(frozen=True)
class Files:
    """The files that one path names, in their order, and those of a folder that are no data."""

    files: list[tuple[str, Path]]
    left_aside: list[str]


def expand(text: str) -> Files:
    """Return the files that a path names, each with its name for users. Raises DataError with every complaint at once.

    A folder gives its data files, those of folders in it too, sorted by path; one that `datasets` saved, the files that
    it says. A pattern gives its matches, sorted. Hidden files are no data.
    """
    if not text.strip():
        raise DataError(f"a path is empty; {WANTED}")
    path = Path(text).expanduser()
    if path.is_dir():
        files = _of_folder(text, path)
    elif not path.exists() and _MARKS.search(text):
        matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if not Path(match).is_dir()]
        if not matches:
            raise DataError(f"{text}: the pattern matches no file (looked in {Path.cwd()})")
        files = Files([(Path(match).as_posix(), Path(match)) for match in matches], [])
    else:
        files = Files([(text, path)], [])
    complaints = [complaint for name, file in files.files if (complaint := _complaint(name, file))]
    if complaints:
        raise DataError("\n".join(complaints))
    return files


def is_data_file(path: Path) -> bool:
    """Tell by its name whether a file can be read."""
    return data_suffix(path) in READERS


def _of_folder(text: str, folder: Path) -> Files:
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(
            f"{text.rstrip('/')}/{name}" for name in _json(folder / "dataset_dict.json").get("splits", [])
        )
        raise DataError(f"{text}: holds the splits of a saved data set; name one of them: {splits}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        saved = [folder / Path(part["filename"]).name for part in _json(folder / "state.json").get("_data_files", [])]
        return Files([(path.as_posix(), path) for path in saved], [])
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    data = [path for path in found if is_data_file(path)]
    if not data:
        raise DataError(f"{text}: the folder holds no data file; {WANTED}")
    _check_one_split(text, folder, data)
    return Files(
        [(path.as_posix(), path) for path in data],
        [path.relative_to(folder).as_posix() for path in found if not is_data_file(path)],
    )


def _check_one_split(text: str, folder: Path, data: list[Path]) -> None:
    """Refuse a folder whose files say that they are for training and for testing: all would be trained on."""
    first: dict[str, str] = {}
    for path in data:
        for split in _splits(path.relative_to(folder)):
            first.setdefault(split, path.relative_to(folder).as_posix())
    if len(first) > 1:
        told = " and ".join(first.values())
        raise DataError(
            f"{text}: holds {told}; name the files that are meant, or a pattern such as {text.rstrip('/')}/train*"
        )


def _splits(path: Path) -> Iterator[str]:
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    yield from dict.fromkeys(_SPLITS[word] for word in words if word in _SPLITS)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _json(path: Path) -> dict[str, list[dict[str, str]]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error


def _complaint(name: str, path: Path) -> str | None:
    if not path.exists():
        return f"{name}: no such file (looked in {Path.cwd()}); {WANTED}"
    suffix = data_suffix(path)
    if suffix not in READERS:
        told = suffix + path.suffix if is_compressed(path) else path.suffix
        return f"{name}: the suffix {told or '(none)'} is unknown; {WANTED}"
    if is_compressed(path) and suffix in _COLUMNAR:
        return f"{name}: a {suffix} file is compressed inside; unpack the {path.suffix} around it"
    if path.stat().st_size == 0:
        return f"{name}: the file is empty; {WANTED} with at least one row"
    return None
