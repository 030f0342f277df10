"""Data made ready ahead of a run, which then finds it in the cache: no mesh and no weight is needed for it."""

from __future__ import annotations

from collections.abc import Iterator

from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening, Tokens
from meshtune.models.source import load_tokenizer, resolve
from meshtune.recipes.planning import resolved_length, vocabulary_of
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import cache_folder


def prepared(recipe: Recipe) -> Iterator[str]:
    """Prepare training and validation data, and yield what is to be said of them, as lines. Raises a MeshtuneError where
    training would.
    """
    source = resolve(recipe.model)
    length, vocabulary = resolved_length(recipe, source), vocabulary_of(source)
    folder = cache_folder() / "data"
    opening = Opening(recipe.rows, load_tokenizer(recipe.model), length, vocabulary, folder, seed=recipe.seed)
    yield from _told("data        ", opening.training())
    for name, data in opening.validation().items():
        yield from _told(f"validation  {name + ': ' if name else ''}", data)
    yield f"kept in     {folder}; training finds it there, on every node that shares it (MESHTUNE_CACHE names another place)"


def _told(prefix: str, data: Tokens) -> Iterator[str]:
    yield from (prefix + line for line in data.report.summary())
    if isinstance(data, TokenDataset):
        yield f"{prefix}fingerprint {data.fingerprint}, {data.folder}"
