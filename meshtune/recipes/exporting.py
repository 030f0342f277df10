"""Turn a checkpoint of a run folder into a Hugging Face folder, or into an adapter's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshtune.checkpoint import folder
from meshtune.checkpoint.checksums import find_sound
from meshtune.checkpoint.loading import load_weights
from meshtune.errors import CheckpointError, RecipeError
from meshtune.layout.world import connect
from meshtune.models import hf
from meshtune.models.adapters import files
from meshtune.models.adapters.merging import Merging
from meshtune.models.adapters.writing import does_nothing, export_adapter
from meshtune.models.export import export
from meshtune.models.source import Source, load_tokenizer, resolve
from meshtune.recipes import merging
from meshtune.recipes.folder import resolved_recipe
from meshtune.recipes.recipe import Recipe

_DTYPES = ("float32", "bfloat16", "float16")
_WORTH_SAYING = 0.01
"""The share of changed weights that rounding takes back from which on it is said."""


@dataclass(frozen=True)
class Exported:
    """The checkpoint that was exported, why newer ones were passed over, and what else a user should know."""

    checkpoint: Path
    passed_over: list[str]
    notes: list[str]


def export_checkpoint(
    run: Path, to: Path, step: str | None = None, dtype: str | None = None, merge: merging.Merge | None = None
) -> Exported:
    """Write a checkpoint of `run` to the folder `to`: that of `step` (a number), the `best`, or the newest.

    Of a run that trained an adapter, the folder is the adapter's, or with `merge` that of a model into which adapters are merged.
    Raises CheckpointError if there is no such complete checkpoint or its files are damaged, RecipeError for an unknown dtype or
    step, or for nothing to merge.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise RecipeError(f"--dtype {dtype}: wanted one of {', '.join(_DTYPES)}")
    if step is not None and step != "best" and not step.isdecimal():
        raise RecipeError(f"--step {step}: wanted the number of a step, or best")
    recipe = resolved_recipe(run)
    if merge is not None:
        merging.check(merge, recipe)
    damaged: dict[Path, str] = {}
    found = find_sound(lambda known: _find(run, step, known), connect("cpu"), damaged)
    assert found is not None  # `_find` raises where there is none
    source = resolve(recipe.model, recipe.quantization)
    _check_target(to, {source.location: "the model that the run started from", **_adapters_read(recipe, merge)})
    asked = dtype or recipe.checkpoint.export_dtype
    try:
        notes = _write(recipe, source, found, to, None if asked == "auto" else getattr(torch, asked), merge)
    except OSError as error:
        raise CheckpointError(f"--to {to} cannot be written: {error}") from error
    return Exported(found.path, folder.survey(run, damaged)[1] if step is None else [], notes)


def _write(
    recipe: Recipe,
    source: Source,
    found: folder.Complete,
    to: Path,
    dtype: torch.dtype | None,
    merge: merging.Merge | None,
) -> list[str]:
    tokenizer = load_tokenizer(recipe.model)
    if merge is not None:
        merging.check_base(merge, source)
        model, merged = merging.merged(recipe, source, tokenizer, found, merge)
        export(model, source, tokenizer, to, dtype, merging=merged)
        return _notes(merged, dtype or source.export_dtype)
    if recipe.peft is not None:
        model, adapter = merging.own_adapter(recipe, source, tokenizer, found)
        idle = export_adapter(model, adapter, source, tokenizer, to, dtype)
        note = f"an adapter of {source.name}; --merge writes the model with it"
        return [note, f"WARNING     {does_nothing(idle)}"] if idle else [note]
    model = hf.build(source, "eager")
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(found.path, model)
    export(model, source, tokenizer, to, dtype)
    return []


def _notes(merged: Merging, dtype: torch.dtype) -> list[str]:
    record = merged.record()
    base, adapters = record["base"], record["adapters"]
    parts = [one["adapter"] + ("" if one["weight"] == 1 else f" ({one['weight']:g} of it)") for one in adapters]
    lines = [f"merged {', then '.join(parts)} into {base['model']}, whose weights are {base['weights']}"]
    if merged.changed and merged.lost > _WORTH_SAYING * merged.changed:
        lines.append(
            f"rounding to {str(dtype).removeprefix('torch.')} takes {merged.lost:,} of {merged.changed:,} changed weights back "
            "to what they were; --dtype float32 keeps every change"
        )
    return lines


def _adapters_read(recipe: Recipe, merge: merging.Merge | None) -> dict[str, str]:
    """Adapters that are read where they are, and what each is."""
    own = (
        {}
        if recipe.peft is None or recipe.peft.adapter is None
        else {recipe.peft.adapter: "the adapter that the run started from"}
    )
    return {
        **own,
        **dict.fromkeys(merge.adapters if merge is not None else (), "the adapter that --adapter names"),
    }


def _check_target(to: Path, read: Mapping[str, str]) -> None:
    """An export takes the place of an export; of nothing else, nor of what is `read` for it."""
    if not to.exists():
        return
    if not to.is_dir() or (any(to.iterdir()) and not _is_export(to)):
        raise CheckpointError(f"--to {to} exists and is not a model folder; name another")
    for name, what in read.items():
        if (origin := Path(name).expanduser()).exists() and to.samefile(origin):
            raise CheckpointError(f"--to {to} is {what}; name another folder")


def _is_export(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / files.CONFIG).is_file()


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
