"""Token files as one data set: documents by number, read where they lie, and sequences cut out of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtune.data import borders, megatron_index, token_files
from meshtune.data.report import DataReport
from meshtune.data.token_files import TokenFile
from meshtune.data.token_paths import expand, index_path
from meshtune.data.units import UnitOptions
from meshtune.data.windows import WindowUnits
from meshtune.errors import DataError

_SAMPLES, _SAMPLE_TOKENS = 64, 1 << 15  # 2 million tokens of each file


@dataclass
class TokenReport(DataReport):
    """What token files hold. `supervised_tokens` counts targets: every token but the first of each document."""

    forms: str = ""

    def summary(self) -> list[str]:
        """Return the report as lines of text."""
        shown = ", ".join(f"{name} {value:,}" for name, value in self.length_percentiles.items())
        names = self.sources if len(self.sources) < 4 else [self.sources[0], "...", self.sources[-1]]
        lines = [
            f"{', '.join(names)}: {len(self.sources):,} file{'s' * (len(self.sources) > 1)} ({self.forms}), "
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.supervised_tokens:,} of them targets",
            f"document lengths in tokens: {shown} (cut into sequences of {self.max_seq_length:,} targets)",
        ]
        return lines + [f"warning: {warning}" for warning in self.warnings]


class TokenCorpus:
    """Documents of token files, in the order of the files. Only where they begin and how long they are is held in memory.

    `fingerprint` is a hash of a sample of the files and of the settings that decide their documents; `lengths` [D] int64 are
    tokens of each document.
    """

    def __init__(
        self,
        files: Sequence[tuple[TokenFile, borders.Spans]],
        vocabulary: int,
        max_seq_length: int,
        notes: Sequence[str],
    ) -> None:
        """Raises DataError where there is no token to predict, or a sample of the ids shows one outside the vocabulary."""
        self._files = [file for file, _ in files]
        self._vocabulary, self._longest, self._notes = vocabulary, max_seq_length, list(notes)
        self._starts = np.concatenate([starts for _, (starts, _) in files])
        self.lengths: NDArray[np.int64] = np.concatenate([lengths for _, (_, lengths) in files])
        self._ends = np.cumsum([len(starts) for _, (starts, _) in files])
        self._maps: dict[int, NDArray[Any]] = {}
        if not (self.lengths > 1).any():
            raise DataError(
                f"{', '.join(f.name for f in self._files)}: no document has two tokens, of which one is predicted"
            )
        for file in self._files:
            self._sample(file)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, count: int) -> NDArray[np.int64]:
        """Return tokens `start` to `start + count - 1` of a document. Raises DataError for an id outside the vocabulary."""
        number = int(np.searchsorted(self._ends, document, side="right"))
        if number not in self._maps:
            self._maps[number] = self._files[number].map()
        first = int(self._starts[document]) + start
        ids = np.array(self._maps[number][first : first + count], dtype=np.int64)
        self._check(self._files[number], ids, first)
        return ids

    def units(self, options: UnitOptions) -> WindowUnits:
        """Return the sequences of an epoch; see WindowUnits. They are cut, not packed: no option of packing applies."""
        return WindowUnits(self, options, options.max_seq_length or self._longest)

    @property
    def mean_length(self) -> float:
        """Tokens of the sequence's part in which the average token stands."""
        whole, rest = np.divmod(np.maximum(self.lengths - 1, 0), self._longest)
        squares = float(whole.sum()) * self._longest**2 + float(np.square(rest, dtype=np.float64).sum())
        return squares / float(whole.sum() * self._longest + rest.sum())

    @property
    def supervised_share(self) -> float:
        """Targets per position: every position of a sequence predicts a token."""
        return 1.0

    @cached_property
    def fingerprint(self) -> str:
        """A hash of samples of files and documents."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self._files:
            digest.update(f"{file.digest()} {file.dtype.str} {file.offset} {file.count}".encode())
        some = np.linspace(0, len(self) - 1, min(len(self), 1 << 16)).astype(np.int64)
        digest.update(f"{len(self)} {self._ends.tolist()}".encode())
        digest.update(np.stack([self._starts[some], self.lengths[some]]).tobytes())
        return digest.hexdigest()

    @cached_property
    def report(self) -> TokenReport:
        """Counts of files, documents and tokens."""
        tokens, targets = int(self.lengths.sum()), int(np.maximum(self.lengths - 1, 0).sum())
        report = TokenReport(
            [file.name for file in self._files],
            "tokens",
            self._longest,
            documents=len(self),
            tokens=tokens,
            supervised_tokens=targets,
            warnings=self._notes,
            forms=", ".join(dict.fromkeys(file.form for file in self._files)),
        )
        report.measure(self.lengths)
        return report

    def _sample(self, file: TokenFile) -> None:
        """Read rather than map: a page that is looked at once need not be held."""
        halves, some = True, False
        for start in np.linspace(0, max(file.count - _SAMPLE_TOKENS, 0), _SAMPLES).astype(np.int64).tolist():
            ids = file.part(start, _SAMPLE_TOKENS)
            self._check(file, ids, start)
            halves = halves and not ids[1 - start % 2 :: 2].any()
            some = some or bool(ids.any())
        if halves and some and file.guessed and file.dtype.itemsize == 2 and file.count > 1:
            raise DataError(
                f"{file.name}: read as uint16, as the vocabulary of {self._vocabulary:,} suggests, every second token is 0; "
                "it looks like 4-byte ids: set data.token_dtype: uint32 (or uint16, if it is right)"
            )

    def _check(self, file: TokenFile, ids: NDArray[Any], first: int) -> None:
        if len(ids) and (int(ids.max()) >= self._vocabulary or int(ids.min()) < 0):
            at = int(np.flatnonzero((ids >= self._vocabulary) | (ids < 0))[0])
            raise DataError(
                f"{file.name}: token {first + at:,} is {ids[at]}, but the model's vocabulary is 0 to {self._vocabulary - 1:,} "
                f"(read as {file.form}); the file is another tokenizer's, or data.token_dtype is not {file.dtype.name}"
            )


def open_corpus(
    paths: Sequence[str],
    *,
    vocabulary: int,
    max_seq_length: int,
    separator: int | None,
    token_dtype: str | None,
    cache: str | os.PathLike[str],
) -> TokenCorpus:
    """Return the token files that paths, patterns and folders name, in that order, as one data set.

    Args:
        vocabulary: ids are 0 to vocabulary - 1.
        max_seq_length: targets of a sequence.
        separator: the id that ends a document in a file without an index; None: such a file is one document.
        token_dtype: the dtype of raw files; None: by the vocabulary.
        cache: where to keep what a look through a whole file has found.

    Raises DataError for files that are missing, damaged or hold other ids, and for a setting that no file needs.
    """
    opened, notes = [], []
    for name, path in (found for text in paths for found in expand(text)):
        if index_path(path).exists():
            file, spans, remarks = megatron_index.open_indexed(name, path, token_dtype)
            notes += remarks
        else:
            file = token_files.open_plain(name, path, token_dtype, vocabulary)
            spans = borders.spans(file, separator, Path(cache))
        opened.append((file, spans))
    return TokenCorpus(opened, vocabulary, max_seq_length, notes)
