"""Turn a checkpoint of a run folder into a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from meshtune.checkpoint import folder
from meshtune.checkpoint.checksums import find_sound
from meshtune.checkpoint.loading import load_weights
from meshtune.errors import CheckpointError, RecipeError
from meshtune.layout.world import connect
from meshtune.models import hf
from meshtune.models.export import export
from meshtune.models.source import load_tokenizer, resolve
from meshtune.recipes.folder import resolved_recipe

_DTYPES = ("float32", "bfloat16", "float16")


def export_checkpoint(run: Path, to: Path, step: str | None = None, dtype: str | None = None) -> tuple[Path, list[str]]:
    """Write a checkpoint of `run` to the folder `to`: that of `step` (a number), the `best`, or the newest. Returns its path, and
    why others were passed over.

    Raises CheckpointError if there is no such complete checkpoint or its files are damaged, RecipeError for an unknown dtype or
    step.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise RecipeError(f"--dtype {dtype}: wanted one of {', '.join(_DTYPES)}")
    if step is not None and step != "best" and not step.isdecimal():
        raise RecipeError(f"--step {step}: wanted the number of a step, or best")
    recipe = resolved_recipe(run)
    damaged: dict[Path, str] = {}
    found = find_sound(lambda known: _find(run, step, known), connect("cpu"), damaged)
    assert found is not None  # `_find` raises where there is none
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
    return found.path, folder.survey(run, damaged)[1] if step is None else []


def _check_target(to: Path, origin: Path) -> None:
    """An export takes the place of an export; of nothing else."""
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / "config.json").is_file())):
        raise CheckpointError(f"--to {to} exists and is not a model folder; name another")
    if to.exists() and origin.exists() and to.samefile(origin):
        raise CheckpointError(f"--to {to} is the model that the run started from; name another folder")


def _find(run: Path, step: str | None, known: Mapping[Path, str]) -> folder.Complete:
    if step is not None:
        number = _best_step(run) if step == "best" else int(step)
        path = folder.path_of(run, number)
        if not path.is_dir():
            raise CheckpointError(f"{run} has no checkpoint of step {number}; complete ones: {_steps(run)}")
        return folder.read(path, known)
    complete, damaged = folder.survey(run, known)
    if not complete:
        raise CheckpointError("; ".join([f"{run} has no complete checkpoint", *damaged]))
    return complete[-1]


def _best_step(run: Path) -> int:
    best = folder.best(run)
    if best is None:
        raise CheckpointError(
            f"--step best: {run} has no best checkpoint, which only a run with checkpoint.best_metric keeps; name the step of "
            f"a complete one: {_steps(run)}"
        )
    return best.step


def _steps(run: Path) -> str:
    return ", ".join(str(complete.step) for complete in folder.checkpoints(run)) or "none"
