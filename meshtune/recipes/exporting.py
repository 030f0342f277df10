"""Turn a checkpoint of a run folder into a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from meshtune.checkpoint import folder
from meshtune.checkpoint.loading import load_weights
from meshtune.errors import CheckpointError, RecipeError
from meshtune.models import hf
from meshtune.models.export import export
from meshtune.models.source import load_tokenizer, resolve
from meshtune.recipes.folder import resolved_recipe

_DTYPES = ("float32", "bfloat16", "float16")


def export_checkpoint(run: Path, to: Path, step: int | None = None, dtype: str | None = None) -> Path:
    """Write checkpoint `step` (default: the newest) of `run` to the folder `to`; returns the checkpoint's path.

    Raises CheckpointError if there is no such complete checkpoint, RecipeError for an unknown dtype.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise RecipeError(f"--dtype {dtype}: wanted one of {', '.join(_DTYPES)}")
    recipe = resolved_recipe(run)
    found = _find(run, step)
    source = resolve(recipe.model)
    _check_target(to, Path(source.location))
    model = hf.build(source, "eager")
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(found.path, model)
    asked = dtype or recipe.checkpoint.export_dtype
    try:
        export(model, source, load_tokenizer(recipe.model), to, None if asked == "auto" else getattr(torch, asked))
    except OSError as error:
        raise CheckpointError(f"--to {to} cannot be written: {error}") from error
    return found.path


def _check_target(to: Path, origin: Path) -> None:
    """An export takes the place of an export; of nothing else."""
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / "config.json").is_file())):
        raise CheckpointError(f"--to {to} exists and is not a model folder; name another")
    if to.exists() and origin.exists() and to.samefile(origin):
        raise CheckpointError(f"--to {to} is the model that the run started from; name another folder")


def _find(run: Path, step: int | None) -> folder.Complete:
    if step is not None:
        path = run / "checkpoints" / f"step-{step}"
        if not path.is_dir():
            steps = ", ".join(str(c.step) for c in folder.checkpoints(run)) or "none"
            raise CheckpointError(f"{run} has no checkpoint of step {step}; complete ones: {steps}")
        return folder.read(path)
    newest = folder.newest(run)
    if newest is None:
        raise CheckpointError(f"{run} has no complete checkpoint")
    return newest
