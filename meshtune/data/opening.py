"""From the `data` section to data that is tokens, whatever its sources are: rows that are prepared, or token files that are so
already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshtune.data import store
from meshtune.data.blend import Blend, Joined
from meshtune.data.dataset import TokenDataset
from meshtune.data.encoders import has_turns
from meshtune.data.held_out import Rows, Subset, hold_out
from meshtune.data.prepare import naming, prepare, preview_of, validation_setting
from meshtune.data.reading import Reading
from meshtune.data.recognise import detect_format
from meshtune.data.section import as_list
from meshtune.data.sources import Source, open_sources
from meshtune.data.stream import Stream, Streaming
from meshtune.data.stream_blend import StreamBlend
from meshtune.data.stream_sources import streamed_sources
from meshtune.data.token_corpus import TokenCorpus, open_corpus
from meshtune.data.token_paths import expand, index_path, is_token_path
from meshtune.errors import DataError

if TYPE_CHECKING:
    from meshtune.data.section import DataSection

Finite = TokenDataset | TokenCorpus | Joined | Blend | Subset
Tokens = Finite | Stream | StreamBlend


@dataclass(frozen=True)
class Opening:
    """What decides tokens beside the section itself: the tokenizer, the longest document in tokens, and the number of ids that
    the model has an embedding for (None: the tokenizer's). `cache_dir` and `verify_cache` as in `prepare`; `streaming` says how
    the ranks of a node share a stream; `seed` chooses the rows that are held out.
    """

    section: DataSection
    tokenizer: Any
    max_seq_length: int
    vocabulary: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    streaming: Streaming | None = None
    seed: int = 42
    verify_cache: bool = True

    def training(self) -> Tokens:
        """Return the training data. Raises DataError naming what cannot be used."""
        return self._train[0]

    @cached_property
    def _train(self) -> tuple[Tokens, Finite | None]:
        """Training data, and what of it is held out for validation."""
        size = self.section.validation_size
        if size is None:
            return self._whole(), None
        self._check_turns()
        with naming("data.train_path"):
            parts = [cast(Rows, part._open(as_list(part.section.train_path), part._split)) for part in self._parts()]
            weights = [source.weight for source in self.section.sources if source.weight is not None]
            cut = self.max_seq_length if self.section.overlong == "split" else None
            if not weights:
                return hold_out(parts[0] if len(parts) == 1 else Joined(parts), size, self.seed, cut)
            total = sum(map(len, parts))
            pairs = [
                hold_out(p, size if size < 1 else max(1, round(size * len(p) / total)), self.seed, cut) for p in parts
            ]
            return Blend([kept for kept, _ in pairs], weights), Joined([held for _, held in pairs])

    @property
    def _split(self) -> str:
        return self.section.train_split or "train"

    def _whole(self) -> Tokens:
        self._check_separator()
        self._check_turns()
        with naming("data.train_path"):
            if self.section.streaming:
                return self._stream()
            paths, weights = as_list(self.section.train_path), [source.weight for source in self.section.sources]
            if len(weights) == 0 or (weights[0] is None and all(map(is_token_path, paths))):
                return self._open(paths, self._split)
            parts = [part._open(as_list(part.section.train_path), part._split) for part in self._parts()]
            given = [weight for weight in weights if weight is not None]
            return Blend(parts, given) if given else _joined(parts)

    def _stream(self) -> Stream | StreamBlend:
        if self.streaming is None:
            raise DataError(
                "data.streaming: true prepares rows while training goes on; there is nothing to prepare before"
            )
        parts, weights = self._parts(), [source.weight for source in self.section.sources if source.weight is not None]
        places = [self.streaming.part(number, weight / sum(weights)) for number, weight in enumerate(weights)]
        streams: list[Stream] = []
        try:
            for part, place in zip(parts, places or [self.streaming], strict=True):
                paths = as_list(part.section.train_path)
                streams.append(Stream(part.section, paths, part.tokenizer, part.max_seq_length, place))
            for stream in streams:
                assert stream.first is not None
        except Exception:
            for stream in streams:
                stream.close()
            raise
        return StreamBlend(streams, weights) if weights else streams[0]

    def validation(self) -> dict[str, Finite]:
        """Return the validation sets by name, one alone under "". Raises DataError naming what cannot be used."""
        split = self.section.validation_split or "validation"
        found: dict[str, Finite] = {} if self._train[1] is None else {"": self._train[1]}
        for name, paths in self.section.validation_sets.items():
            with naming(validation_setting(name)):
                found[name] = self._open(as_list(paths), split)
        return found

    def _parts(self) -> list[Opening]:
        """One for each source, if there are several."""
        section = self.section
        return [replace(self, section=section.of_source(source)) for source in section.sources] or [self]

    def preview(self) -> list[str]:
        """Return what can be known of the data in a second, as lines: of rows the first ones, of token files all.

        Raises DataError as training would, save that unusable first rows are only counted.
        """
        held_out = self.section.validation_split or "validation"
        sets = [(validation_setting(name), paths, held_out) for name, paths in self.section.validation_sets.items()]
        lines = []
        self._check_turns()
        with naming("data.train_path"):
            for part in self._parts():
                lines += part._preview(as_list(part.section.train_path), part._split, self.section.streaming)
        for setting, paths, split in sets:
            with naming(setting):
                lines += self._preview(as_list(paths), split)
        return lines

    def _preview(self, paths: Sequence[str], split: str, streaming: bool = False) -> list[str]:
        if any(is_token_path(path) for path in paths):
            return self._open(paths, split).report.summary()
        sources = self._sources(paths, split, streaming)
        report = preview_of(self.section, sources, self.tokenizer, self.max_seq_length)
        return [f"first rows: {line}" for line in report.summary()]

    def _open(self, paths: Sequence[str], split: str) -> TokenDataset | TokenCorpus:
        token_paths = [path for path in paths if is_token_path(path)]
        if not token_paths:
            return prepare(
                self.section,
                list(paths),
                self.tokenizer,
                self.max_seq_length,
                split=split,
                cache_dir=self.cache_dir,
                verify_cache=self.verify_cache,
            )
        if len(token_paths) < len(paths):
            rows = next(path for path in paths if path not in token_paths)
            raise DataError(
                f"{token_paths[0]} holds tokens, {rows} rows: they have no order in common; give both a weight"
            )
        return self.token_files(token_paths)

    def token_files(self, paths: Sequence[str]) -> TokenCorpus:
        """Return the data set of token files. Raises DataError naming what cannot be used."""
        return open_corpus(
            paths,
            vocabulary=len(self.tokenizer) if self.vocabulary is None else self.vocabulary,
            max_seq_length=self.max_seq_length,
            separator=self._separator(),
            token_dtype=self.section.token_dtype,
            cache=Path(store.cache_folder(self.cache_dir)),
        )

    def _check_separator(self) -> None:
        files = [path for text in self.section.token_paths for _, path in expand(text)]
        if self.section.document_separator is not None and all(index_path(path).exists() for path in files):
            raise DataError(
                "data.document_separator: every token file has an index that says where documents end; leave it out"
            )

    def _check_turns(self) -> None:
        """Raise DataError where a setting of assistant turns is set, and no set of rows has any."""
        keys = [key for key in ("train_on", "reasoning") if getattr(self.section, key) is not None]
        if not keys:
            return
        seen: list[str] = []
        for row_format in self._formats():
            if has_turns(row_format, self.tokenizer):
                return
            seen.append(f"`{row_format}`")
        told = " and of ".join(dict.fromkeys(seen)) or "token files"
        raise DataError(f"data.{keys[0]} has no effect: rows of {told} have no assistant turns here")

    def _formats(self) -> Iterator[str]:
        """Yield the format of each set of rows, of training and of validation, by its first rows."""
        held_out = self.section.validation_split or "validation"
        for part in self._parts():
            with naming("data.train_path"):
                yield from part._format(as_list(part.section.train_path), part._split, self.section.streaming)
        for name, paths in self.section.validation_sets.items():
            with naming(validation_setting(name)):
                yield from self._format(as_list(paths), held_out)

    def _format(self, paths: Sequence[str], split: str, streaming: bool = False) -> Iterator[str]:
        if not any(map(is_token_path, paths)):
            yield detect_format(self._sources(paths, split, streaming), self.section.format)

    def _sources(self, paths: Sequence[str], split: str, streaming: bool) -> list[Source]:
        opened = streamed_sources if streaming else open_sources
        return opened(list(paths), split, self.section.hub_config, Reading.of(self.section))

    def _separator(self) -> int | None:
        asked, own = self.section.document_separator, self.tokenizer.eos_token_id
        if asked == "eos" and own is None:
            raise DataError("data.document_separator is eos, but the tokenizer names none; write its id, or `none`")
        if asked == "none":
            return None
        return asked if isinstance(asked, int) else own


def _joined(parts: Sequence[TokenDataset | TokenCorpus]) -> Joined:
    rows = [part for part in parts if isinstance(part, TokenDataset)]
    if len(rows) < len(parts):
        raise DataError("some sources hold tokens, others rows: they have no order in common; give each a weight")
    return Joined(rows)
