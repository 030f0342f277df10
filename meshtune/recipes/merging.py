"""Merge adapters into the weights under them: a run's own, adapters' folders, or both, one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from meshtune.checkpoint.folder import Complete
from meshtune.checkpoint.loading import load_weights
from meshtune.errors import ModelError, RecipeError
from meshtune.models import hf
from meshtune.models.adapters import files
from meshtune.models.adapters.merging import Change, Merging, Part, changes
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.adapters.view import Adapter, kept_of
from meshtune.models.headers import stored_dtypes
from meshtune.models.initialize import initialize
from meshtune.models.source import Source
from meshtune.observe import compute_dtype
from meshtune.recipes import adapting, quantizing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from meshtune.recipes.recipe import Recipe

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Merge:
    """What is merged.

    Attributes:
        adapters: folders or hub ids, merged in this order after the run's own adapter, if it has one.
        weights: how much is taken of each, the run's own first; none: all of each.
        base: of a run with quantised weights, whether adapters are added to those, or to what they were quantised from.
    """

    adapters: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    base: Literal["quantized", "original"] | None = None


def check(merge: Merge, recipe: Recipe) -> None:
    """Raises RecipeError for what does not fit the run, ModelError for what is no adapter's folder."""
    count = (recipe.peft is not None) + len(merge.adapters)
    if not count:
        raise RecipeError(
            "--merge: the run has trained no adapter; name one to merge into its weights: --adapter FOLDER"
        )
    if merge.weights and len(merge.weights) != count:
        own = "the run's own adapter first, then " if recipe.peft is not None else ""
        raise RecipeError(
            f"--weight: {len(merge.weights)} given for {count} adapters; give one for each: {own}as --adapter"
        )
    if wrong := [weight for weight in merge.weights if not math.isfinite(weight)]:
        raise RecipeError(f"--weight: found {wrong[0]}; wanted a finite number")
    if merge.base is not None and (recipe.quantization is None or recipe.quantization.qat):
        raise RecipeError(f"--base {merge.base}: the run's weights were not quantised; leave it out")
    from meshtune.models.adapters.inject import require_peft

    require_peft()
    for name in merge.adapters:
        with _named_on_the_command_line():
            files.read_config(files.find(name))


@contextmanager
def _named_on_the_command_line() -> Iterator[None]:
    """What is wrong with a recipe's `peft.adapter` is wrong here with `--adapter`."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("peft.adapter:", "--adapter:", 1)) from error


def check_base(merge: Merge, source: Source) -> None:
    """Raises ModelError where weights are asked for that were never there."""
    if merge.base == "original" and getattr(source.config, "quantization_config", None):
        raise ModelError(f"--base original: {source.name} holds quantised weights and no others; leave it out")


def merged(
    recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerBase, found: Complete, merge: Merge
) -> tuple[PreTrainedModel, Merging]:
    """The model without adapters, whole on the CPU, and what is to be done to it on its way into files."""
    trained_with = adapting.held(source, recipe, compute_dtype(found.manifest["precision"]))
    quantised = recipe.quantization is not None and merge.base != "original"
    weights = merge.weights or (1.0,) * (1 + len(merge.adapters))
    parts, others = [], []
    if recipe.peft is not None:
        wrapped, adapter = own_adapter(recipe, source, tokenizer, found)
        tensors = dict(_tensors(wrapped, adapter))
        parts.append(Part(str(found.path), changes(wrapped, tensors, trained_with.master_dtype), weights[0]))
    for name in merge.adapters:
        with _named_on_the_command_line():
            folder, adapter, made = _of_folder(name, source)
        others.append((folder, adapter))
        parts.append(Part(name, made, weights[len(parts)]))
    model, values = _base(recipe, source, trained_with, tokenizer, found, quantised)
    for folder, adapter in others:
        with _named_on_the_command_line():
            files.check_base({inner: model.get_submodule(path) for path, inner in adapter.inner.items()}, folder)
    base = {"model": source.name, "revision": source.section.revision, "weights": values}
    return model, Merging(parts, base)


def own_adapter(
    recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerBase, found: Complete
) -> tuple[PreTrainedModel, Adapter]:
    """The run's adapter as the checkpoint has it, in a model whose other weights are on meta."""
    from meshtune.models.adapters.decomposition import keep_beginning

    chosen = adapting.choose(recipe, source, tokenizer)
    assert chosen is not None and recipe.peft is not None
    model, adapter = _wrapped(source, recipe.peft, chosen)
    _give_storage(model, adapter)
    if adapter.kept:
        keep_beginning(model)
    load_weights(found.path, model, kept_of(model))
    return model, adapter


def _wrapped(source: Source, section: AdapterSection, chosen: adapting.Chosen) -> tuple[PreTrainedModel, Adapter]:
    from meshtune.models.adapters.inject import inject

    model = hf.build(source, "eager")
    return model, inject(model, section, chosen.config)


def _give_storage(model: nn.Module, adapter: Adapter) -> None:
    """To the adapter in a meta model; what is tied stays tied."""
    given: dict[int, nn.Parameter] = {}
    own = {id(p) for name, p in model.named_parameters() if name in adapter.tensors}
    for module in model.modules():
        for leaf, p in module._parameters.items():
            if p is not None and id(p) in own:
                module._parameters[leaf] = given.setdefault(id(p), nn.Parameter(torch.empty_like(p, device=_CPU)))


def _tensors(model: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in adapter.trained or name in adapter.kept:
            yield name, tensor.detach()


def _of_folder(name: str, source: Source) -> tuple[Path, Adapter, Mapping[str, Change]]:
    folder = files.find(name)
    section = AdapterSection(adapter=name)
    wrapped, adapter = _wrapped(source, section, adapting.Chosen(files.read_config(folder)))
    tensors = files.read_whole(wrapped, adapter, folder)
    return folder, adapter, changes(wrapped, tensors)


def _base(
    recipe: Recipe,
    source: Source,
    held: Source,
    tokenizer: PreTrainedTokenizerBase,
    found: Complete,
    quantised: bool,
) -> tuple[PreTrainedModel, str]:
    """The weights that adapters are merged into, and a word on them for the record."""
    if recipe.peft is None:
        model = hf.build(source, "eager")
        model.to_empty(device="cpu")
        model.tie_weights()
        load_weights(found.path, model)
        return model, f"as trained: {found.path}"
    adapting.base_of(recipe, source, None, found)
    held = held if quantised else replace(source, held=_widest(source))
    model = hf.build(held, "eager")
    values = "as the checkpoint has them"
    if quantised:
        values = f"those of {_quantise(model, recipe, source, tokenizer)}, which it was trained with"
    elif recipe.quantization is not None:
        values = "as the checkpoint has them, not as they were quantised in training"
    if source.section.weights == "random":
        initialize(model, recipe.seed, _CPU)
    else:
        hf.load(model, held, _CPU)
    return model, values


def _quantise(model: PreTrainedModel, recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Let the bare meta `model` hold what the run held in few bits. Returns in which form."""
    from meshtune.models.quantization.choosing import quantise

    chosen = quantizing.choose(recipe, source, adapting.choose(recipe, source, tokenizer))
    assert chosen is not None
    quantise(model, chosen)
    return chosen.codec.name


def _widest(source: Source) -> torch.dtype:
    """A dtype that holds every weight of the checkpoint as it is; of one that the recipe rounds, what it is rounded to."""
    stored = {dtype for dtype in stored_dtypes(source.files).values() if dtype is not None}
    if source.section.dtype != "auto" or len(stored) < 2:
        return source.export_dtype
    return torch.float32
