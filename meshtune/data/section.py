"""The `data` section of a recipe: what is read, how a row becomes tokens, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.data.combinations import combinations
from meshtune.data.row_function import problem
from meshtune.data.shapes import columns_of_format
from meshtune.data.sources import is_hub_id
from meshtune.data.token_paths import is_token_path

if TYPE_CHECKING:
    from meshtune.data.packing import PackingOptions

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "tokens", "text"]
TrainOn = Literal["all", "last"]
Reasoning = Literal["template", "keep"]
Overlong = Literal["truncate", "drop", "split", "error"]
TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]

_SET_NAME = re.compile(r"[A-Za-z0-9_]+")


class SourceSection(Section):
    """One of several sources in `data.train_path`. What is not set here is as in `data`."""

    path: str | list[str] = Field(
        description="A file, folder, pattern, list of them, or hub id, as in data.train_path."
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        description="Share of an epoch's rows or packs, in proportion to the weights of all sources. Set for all or for none.",
    )
    split: str | None = Field(default=None, description="Split of a hub id.")
    hub_config: str | None = Field(default=None, description="Configuration (subset) of a hub id.")
    format: Format | None = Field(default=None, description="What a row is.")
    columns: dict[str, str] | None = Field(default=None, description="What the data calls a column.")
    row_function: str | None = Field(default=None, description="`file.py:function`, your own.")

    @property
    def paths(self) -> list[str]:
        """The path, or all of them."""
        return as_list(self.path)


class DataSection(Section):
    """What the model learns from, and how its rows become batches."""

    train_path: str | list[str | SourceSection] = Field(
        description="Training data: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow; text also .gz, .bz2, .xz, .zst), a "
        "folder or a pattern of them, a list, or a hub id (org/name); for "
        "`recipe: pretrain` also token files: .bin, raw, with llm.c's header, or with Megatron's .idx beside them. An item of a "
        "list may be `{path, weight, split, hub_config, format, columns, row_function}`."
    )
    validation_path: str | list[str] | dict[str, str | list[str]] | None = Field(
        default=None,
        description="Validation data, in the same forms, or several sets by name (`{chat: a.jsonl, code: b.jsonl}`), each with "
        "metrics of its own. Losses are token-weighted.",
    )
    validation_size: int | float | None = Field(
        default=None,
        gt=0,
        description="Rows of the training data to keep apart for validation, chosen by the seed, in place of validation_path: a "
        "count, or a fraction below 1 (of each source that has a weight).",
    )
    train_split: str | None = Field(
        default=None, description="Split of a hub id to train on (default: train). Hub ids only."
    )
    validation_split: str | None = Field(
        default=None, description="Split of a hub id to validate on (default: validation). Hub ids only."
    )
    hub_config: str | None = Field(default=None, description="Configuration (subset) of a hub id. Hub ids only.")
    format: Format = Field(
        default="auto",
        description="What a row is: `messages` (OpenAI chat rows), `sharegpt` (`conversations`), `alpaca` (`instruction`, "
        "`input`, `output`), `prompt_completion`, `tokens` (`input_ids`), `text`; `auto`: by the columns.",
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description="What the data calls a column, for each name of the format: `{messages: dialog}` reads `dialog` as "
        "`messages`.",
    )
    row_function: str | None = Field(
        default=None,
        description="`file.py:function`, your own: it takes a row's columns as a dict and returns a dict, a list of dicts, or "
        "None to leave the row out. It runs before `columns` and `format` look at the row.",
    )
    train_on: TrainOn | None = Field(
        default=None,
        description="Assistant turns to learn in conversations: `all` (the default), or the `last` one of a row. `weight: 0` or "
        "`train: false` on a message, `weight: 0` on a content part, and a column `train_on_turns` of 0 and 1 take away more.",
    )
    reasoning: Reasoning | None = Field(
        default=None,
        description="Reasoning of earlier turns in conversations: as the chat `template` shows it (the default), or `keep`: in "
        "the text and learnt, though the template strips it.",
    )
    max_unusable: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Largest share of rows that may be unusable; more than that is an error that says why they are.",
    )
    num_workers: int | None = Field(
        default=None,
        ge=1,
        description="Processes that prepare rows (default: one for each core, once there is work for them; on a stream, beside "
        "which training runs, one for every 4 cores, at most 8); 1: none but the run's own. The result is the same.",
    )
    shuffle: bool = Field(default=True, description="Permute the rows each epoch, by the seed; false: file order.")
    packing: bool = Field(
        default=False,
        description="Pack rows, isolated from each other, up to max_seq_length; no padding is computed.",
    )
    packing_window: int | Literal["all"] | None = Field(
        default=None,
        description="How many rows of the order are packed together: a number, or `all` (default: 4096, or enough for 64 packs).",
    )
    max_documents_per_pack: int | None = Field(
        default=None, gt=0, description="The most rows that a pack may hold (default: as many as fit)."
    )
    max_seq_length: int | None = Field(
        default=None,
        description="Longest row, in tokens (default: the model's positions, at most 2048).",
    )
    overlong: Overlong = Field(
        default="truncate",
        description="Rows longer than max_seq_length: `truncate` keeps the start, `drop` leaves the row out, "
        "`split` makes consecutive rows of it, `error` stops and names the row.",
    )
    drop_last: bool = Field(
        default=False, description="Leave out an epoch's last, short global batch instead of training on it."
    )
    streaming: bool = Field(
        default=False,
        description="Prepare training rows while training goes on, block by block, instead of all of them before: for data that "
        "is endless, remote or larger than the disk. Needs training.max_steps.",
    )
    shuffle_buffer: int | None = Field(
        default=None,
        gt=0,
        description="Rows of a block of a stream (default: 4096). A block is shuffled and packed on its own. Streaming only.",
    )
    token_dtype: TokenDtype | None = Field(
        default=None,
        description="Type of the ids in a raw token file (default: uint16 for a vocabulary up to 65,536, else uint32). A header "
        "or an index says it itself.",
    )
    document_separator: int | Literal["eos", "none"] | None = Field(
        default=None,
        description="The id that ends a document in a token file without an index: `eos` (the default, if the tokenizer has "
        "one), an id, or `none`: the file is one document.",
    )

    @property
    def has_sources_of_their_own(self) -> bool:
        """Whether some source of the training data may have a format of its own."""
        return any(isinstance(item, SourceSection) for item in self.train_path)

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation sets, of one alone ""; none where there is no validation."""
        return [""] if self.validation_size is not None else list(self.validation_sets)

    @property
    def validation_sets(self) -> dict[str, str | list[str]]:
        """The paths of each validation set by its name; one set alone has the name ""."""
        if self.validation_path is None:
            return {}
        return self.validation_path if isinstance(self.validation_path, dict) else {"": self.validation_path}

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield (key, message) for each combination inside this section that cannot be meant."""
        if self.max_seq_length is not None and self.max_seq_length < 2:
            yield "max_seq_length", f"is {self.max_seq_length}, but a row needs 2 tokens to hold one target"
        for key, sets in (("train_path", {"": self.train_path}), ("validation_path", self.validation_sets)):
            for paths in sets.values():
                if any(not path.strip() for path in as_list(paths)) or paths == []:
                    yield key, "is empty; name a file, a list of files or a hub id"
        if self.validation_path == {}:
            yield "validation_path", "names no set; write {name: path}, a path, or leave it out"
        for key in ("train_on", "reasoning"):
            if (
                getattr(self, key) is not None
                and self.format in ("text", "tokens")
                and not self.has_sources_of_their_own
            ):
                yield key, f"has no effect: rows of format `{self.format}` have no assistant turns"
        for name in self.validation_sets:
            if name and not _SET_NAME.fullmatch(name):
                yield (
                    "validation_path",
                    f"the name {name!r} becomes part of metrics' names: write letters, digits and _ only",
                )
        yield from self._hub_problems()
        yield from self.column_problems()
        yield from combinations(self)

    @property
    def train_paths(self) -> list[str]:
        """All paths to train on, of all sources."""
        return as_list(self.train_path)

    @property
    def packing_options(self) -> PackingOptions:
        """How rows are packed."""
        from meshtune.data.packing import PackingOptions

        return PackingOptions(self.packing_window, self.max_documents_per_pack)

    @property
    def token_paths(self) -> list[str]:
        """All paths, of training and of validation, that name token files."""
        paths = [self.train_path, *self.validation_sets.values()]
        return [path for listed in paths for path in as_list(listed) if is_token_path(path)]

    @property
    def sources(self) -> list[SourceSection]:
        """The items of train_path, if one of them says more than a path; else none."""
        items = self.train_path if isinstance(self.train_path, list) else []
        if not any(isinstance(item, SourceSection) for item in items):
            return []
        return [item if isinstance(item, SourceSection) else SourceSection(path=item) for item in items]

    def of_source(self, source: SourceSection) -> DataSection:
        """The section with one source alone to train on, and what that one says of itself."""
        said = {key: value for key, value in source if value is not None and key not in ("path", "weight", "split")}
        split = source.split or self.train_split
        return self.model_copy(update={**said, "train_path": source.path, "train_split": split})

    def column_problems(self) -> Iterable[tuple[str, str]]:
        """Yield (key, message) of what `columns` and `row_function` cannot mean."""
        known = columns_of_format(self.format)
        for ours, theirs in (self.columns or {}).items():
            if ours not in known:
                reads = "rows have" if self.format == "auto" else f"`{self.format}` reads"
                yield "columns", f"names {ours!r}, which is no column that {reads}; those are {', '.join(known)}"
            if not theirs:
                yield "columns", f"gives {ours!r} no name; write the data's own name of that column"
        if self.columns == {}:
            yield "columns", "is empty; write {ours: theirs}, or leave it out"
        if self.row_function is not None and (wrong := problem(self.row_function)):
            yield "row_function", wrong

    def _hub_problems(self) -> Iterable[tuple[str, str]]:
        train = any(is_hub_id(path) for path in as_list(self.train_path))
        validation = any(is_hub_id(path) for paths in self.validation_sets.values() for path in as_list(paths))
        if self.train_split is not None and not train:
            yield "train_split", "has no effect: train_path names no hub id"
        if self.validation_split is not None and not validation:
            yield "validation_split", "has no effect: validation_path names no hub id"
        if self.hub_config is not None and not (train or validation):
            yield "hub_config", "has no effect: neither train_path nor validation_path names a hub id"


def as_list(paths: str | Sequence[str | SourceSection] | None) -> list[str]:
    """Return the paths of a setting that takes one path, several, sources that name some, or none."""
    if paths is None:
        return []
    if isinstance(paths, str):
        return [paths]
    return [path for item in paths for path in ([item] if isinstance(item, str) else as_list(item.path))]
