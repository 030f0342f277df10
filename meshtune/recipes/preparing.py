"""Data made ready ahead of a run, which then finds it in the cache: no mesh and no weight is needed for it."""

from __future__ import annotations

from collections.abc import Iterator

from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening, Tokens
from meshtune.data.stream import Stream
from meshtune.data.stream_blend import StreamBlend
from meshtune.data.units import UnitOptions
from meshtune.models.source import load_tokenizer, resolve
from meshtune.recipes.planning import resolved_length, vocabulary_of
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import cache_folder


def prepared(recipe: Recipe) -> Iterator[str]:
    """Prepare training and validation data, and yield what is to be said of them, as lines. Raises a MeshtuneError where
    training would.
    """
    source = resolve(recipe.model, recipe.quantization)
    length, vocabulary = resolved_length(recipe, source), vocabulary_of(source)
    folder = cache_folder() / "data"
    opening = Opening(recipe.rows, load_tokenizer(recipe.model), length, vocabulary, folder, seed=recipe.seed)
    training = opening.training()
    yield from _told("data        ", training)
    yield from (f"data        {note}" for note in _notes_of_units(recipe, length, training))
    for name, data in opening.validation().items():
        yield from _told(f"validation  {name + ': ' if name else ''}", data)
    yield f"kept in     {folder}; training finds it there, on every node that shares it (MESHTUNE_CACHE names another place)"


def _notes_of_units(recipe: Recipe, length: int, training: Tokens) -> list[str]:
    """What is said of packs, and of what each source gives to an epoch, before training."""
    section = recipe.data
    assert not isinstance(training, Stream | StreamBlend), "which the opening refuses: they are not prepared"
    asked = UnitOptions(section.shuffle, recipe.seed, section.packing, length, section.packing_options)
    return training.units(asked).notes()


def _told(prefix: str, data: Tokens) -> Iterator[str]:
    yield from (prefix + line for line in data.report.summary())
    if isinstance(data, TokenDataset):
        yield f"{prefix}fingerprint {data.fingerprint}, {data.folder}"
