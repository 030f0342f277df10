"""A recipe's model and data made small: a folder with weights, tokenizer and config, and documents in its small vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from meshtune.data import store
from meshtune.data.encoders import encoder
from meshtune.data.encoding import Encoded
from meshtune.data.opening import Opening
from meshtune.data.prepare import naming
from meshtune.data.reading import Reading
from meshtune.data.recognise import detect_format
from meshtune.data.report import DataReport
from meshtune.data.section import DataSection, as_list
from meshtune.data.sources import open_sources
from meshtune.data.stream_sources import streamed_sources
from meshtune.data.token_paths import is_token_path
from meshtune.errors import DataError, MeshtuneError
from meshtune.layout import Layout
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.section import ModelSection
from meshtune.models.shrink import Degrees
from meshtune.models.source import Source, load_tokenizer, resolve
from meshtune.models.twin import build_twin, miniature_config, parameter_count
from meshtune.verify.layouts import Trial

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe

LONGEST = 32
"""Tokens of a pack, and of the longest document."""
_LENGTHS = (32, 11, 19, 7, 26, 5, 14, 9)
_ROWS_READ = 64


@dataclass(frozen=True)
class Miniature:
    """Where a small model and its documents lie, and what they are small forms of."""

    model: str
    rows: str
    architecture: str
    parameters: int
    sizes: dict[str, Any]
    longest: int


def source_of(section: ModelSection, quantization: QuantizationSection | None = None) -> Source:
    """What is known of the model without its weights, which need not be on this machine."""
    unread = section if section.name.endswith(".gguf") else section.model_copy(update={"weights": "random"})
    return resolve(unread, quantization)


def refusals(source: Source, trials: Sequence[Trial]) -> dict[str, str]:
    """Why the whole model cannot have a layout, as training would say it, for those that it cannot have."""
    found = {}
    for trial in trials:
        try:
            problems = list(Layout.resolve(trial.section, trial.ranks).problems(source.facts()))
        except MeshtuneError as error:
            problems = [str(error)]
        if problems:
            found[trial.name] = "\n".join(problems)
    return found


def build(
    source: Source, degrees: Degrees, documents: Iterable[Encoded], wanted_tokens: int, folder: Path
) -> Miniature:
    """Write a small model of `source` and at least `wanted_tokens` tokens, of documents cut out of the given ones."""
    config = miniature_config(source, degrees)
    model = build_twin(source, config, "eager", torch.device("cpu"))
    model.save_pretrained(folder / "model")
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    vocabulary = weight.shape[0]
    _tokenizer(vocabulary).save_pretrained(folder / "model")
    positions = replace(source, config=config).max_positions
    longest = min(LONGEST, (positions or LONGEST * 4) // 4)
    cut = _documents(list(documents), vocabulary, longest, wanted_tokens)
    report = DataReport(["a slice of the recipe's rows"], "text", longest)
    with store.Writer(folder / "rows") as writer:
        writer.append(cut)
        report.documents, report.tokens = len(cut), sum(writer.lengths)
        report.measure(writer.lengths)
        writer.publish(report)
    parameters = parameter_count(source, config)
    paths = str(folder / "model"), str(folder / "rows")
    return Miniature(*paths, source.model_class.__name__, parameters, _sizes(config), longest)


def documents_of(recipe: Recipe) -> list[Encoded]:
    """The first documents of each source of the recipe, through its own tokenizer.

    Raises DataError if one of them has none to train on.
    """
    section, tokenizer = recipe.rows, load_tokenizer(recipe.model)
    found: list[Encoded] = []
    with naming("data.train_path"):
        for one in [section.of_source(source) for source in section.sources] or [section]:
            if any(map(is_token_path, as_list(one.train_path))):
                found += _of_token_files(one, tokenizer, recipe.model)
            else:
                found += _of_rows(one, tokenizer)
    return found


def _of_token_files(section: DataSection, tokenizer: Any, model: ModelSection) -> list[Encoded]:
    vocabulary = source_of(model).config.get_text_config(decoder=True).vocab_size
    corpus = Opening(section, tokenizer, LONGEST, vocabulary).token_files(as_list(section.train_path))
    long = [int(document) for document in np.flatnonzero(corpus.lengths > 1)[:_ROWS_READ]]
    read = [corpus.read(document, 0, min(int(corpus.lengths[document]), LONGEST)) for document in long]
    return [Encoded(ids.astype(np.int32), np.ones(len(ids), dtype=bool)) for ids in read]


def _of_rows(section: DataSection, tokenizer: Any) -> list[Encoded]:
    opened = streamed_sources if section.streaming else open_sources
    split, reading = section.train_split or "train", Reading.of(section)
    sources = opened(as_list(section.train_path), split, section.hub_config, reading)
    rows_encoder = encoder(section, detect_format(sources, section.format), tokenizer)
    first = list(islice((row for source in sources for row in source.rows()), _ROWS_READ))
    encoded = rows_encoder.encode(first)
    found = [row for row in encoded if isinstance(row, Encoded) and row.supervised[1:].any()]
    if not found:
        raise DataError(f"none of the first {len(first)} rows can be trained on; `meshtune check` says why")
    return found


def random_documents(count: int = 48) -> list[Encoded]:
    """Documents of unequal lengths, each supervised in an unequal part at its end."""
    bits = np.random.default_rng(0)
    lengths = bits.integers(4, 48, count)
    supervised = [np.arange(n) >= min(int(bits.integers(0, n)), n - 2) for n in lengths]
    return [Encoded(bits.integers(0, 2**20, n).astype(np.int32), s) for n, s in zip(lengths, supervised, strict=True)]


def _documents(rows: Sequence[Encoded], vocabulary: int, longest: int, wanted_tokens: int) -> list[Encoded]:
    """Windows of unequal lengths about the first supervised token of each row, round after round until there are enough."""
    found: list[Encoded] = []
    count = 0
    while count < wanted_tokens:
        for row in rows:
            length = min(_LENGTHS[len(found) % len(_LENGTHS)], longest, len(row.input_ids))
            target = int(row.supervised[1:].argmax()) + 1
            start = max(0, min(target - length // 3 - 1, len(row.input_ids) - length))
            ids = row.input_ids[start : start + length] % vocabulary
            found.append(Encoded(ids.astype(np.int32), row.supervised[start : start + length]))
            count += length
            if count >= wanted_tokens:
                break
    return found


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One that has as many tokens as the small model. It names the token that fills padding; the rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"token{i}": i for i in range(vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="token0")), pad_token="token0", eos_token="token1"
    )


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    values = config.get_text_config(decoder=True).to_dict()
    names = (
        "hidden_size n_embd num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads head_dim "
        "num_experts num_local_experts n_routed_experts vocab_size"
    )
    return {name: values[name] for name in names.split() if values.get(name) is not None}
