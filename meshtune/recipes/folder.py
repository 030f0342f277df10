"""The run folder: what a run leaves beside its checkpoints, and whether it may continue what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtune.checkpoint import folder as checkpoint_folder
from meshtune.checkpoint.lock import RunLock
from meshtune.checkpoint.writable import refuse_unwritable, unwritable
from meshtune.config import dump, load, recipe_hash
from meshtune.errors import CheckpointError
from meshtune.observe import environment
from meshtune.observe.atomic import write_atomically
from meshtune.recipes.recipe import Recipe

RESOLVED = "recipe.resolved.yaml"

# Settings that a resumed run may change: they alter what is kept and shown, how the work is cut, or how long it goes on.
# Rows and tokenizer are known by the tokens that they give, not by where they lie.
_FREE = (
    "distributed",
    "checkpoint",
    "logging",
    "training.per_device_batch_size",
    "training.activation_checkpointing",
    "training.activation_checkpointing_every",
    "training.activation_checkpointing_keep",
    "training.activation_offload",
    "training.offload",
    "optimizer.in_backward",
    "training.compile",
    "training.eval_every_steps",
    "training.eval_every_epochs",
    "data.train_path",
    "data.validation_path",
    "data.validation_split",
    "data.columns",
    "data.row_function",
    "data.max_unusable",
    "data.num_workers",
    "model.attention",
    "model.tokenizer",
)
# Settings that change the numbers from here on; allowed, and said.
_OPTIMIZER_CONSTANTS = tuple(
    f"optimizer.{key}"
    for key in (
        *("weight_decay", "betas", "eps", "momentum", "nesterov", "groups"),
        *("adjust_lr", "decay_rate", "clip_threshold", "precondition_frequency"),
    )
)
_ADAPTER_RATES = ("peft.dropout", "peft.loraplus_lr_ratio", "peft.loraplus_lr_embedding")
_DECLARED = ("training", "lr_scheduler", *_OPTIMIZER_CONSTANTS, *_ADAPTER_RATES)


def write_facts(run: Path, recipe: Recipe, layout: dict[str, Any], data: dict[str, Any]) -> None:
    """`recipe.resolved.yaml`, `layout.json`, `data.json`, `environment.json`."""
    texts = {RESOLVED: dump(recipe)}
    around = {"recipe_hash": recipe_hash(recipe), **environment()}
    for name, values in (("layout", layout), ("data", data), ("environment", around)):
        texts[f"{name}.json"] = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    try:
        for name, text in texts.items():
            write_atomically(run / name, text.encode("utf-8"))
    except OSError as error:
        raise _unwritable(run, error) from error


def add_to_layout(run: Path, facts: Mapping[str, Any]) -> None:
    """Write more into `layout.json`, from which the report has it too. Raises CheckpointError if it cannot be written."""
    file = run / "layout.json"
    try:
        values = {**json.loads(file.read_text(encoding="utf-8")), **facts}
        write_atomically(file, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
    except OSError as error:
        raise _unwritable(run, error) from error


def take(run: Path) -> RunLock:
    """Make the run folder if it is not there; the lock on it is held while the result is open.

    Raises CheckpointError if it cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run, error) from error
    return RunLock(run)


def _unwritable(run: Path, error: OSError) -> CheckpointError:
    return unwritable(run, run, error.strerror or str(error))


def resolved_recipe(run: Path) -> Recipe:
    """The recipe that a run folder was made by. Raises CheckpointError if it is not a run folder."""
    file = run / RESOLVED
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no {RESOLVED}")
    return load(Recipe, str(file))


def find_resume(
    recipe: Recipe, run: Path, known: Mapping[Path, str] | None = None
) -> checkpoint_folder.Complete | None:
    """The checkpoint to continue from, or None to start anew. Changes nothing. `known` are those whose files have been found
    damaged, with the reason.

    Raises CheckpointError if neither would be right, or the folder could not be written.
    """
    refuse_unwritable(run)
    wanted = recipe.checkpoint.resume_from
    if wanted not in ("auto", "never"):
        return _named(Path(wanted), known)
    complete, damaged = checkpoint_folder.survey(run, known)
    if wanted == "never" and complete:
        raise CheckpointError(
            f"checkpoint.resume: never, but {run} holds checkpoints up to step {complete[-1].step}; name another "
            "checkpoint.dir, or remove them"
        )
    if not complete and damaged:
        raise CheckpointError(
            f"no complete checkpoint to resume from in {run}: {'; '.join(damaged)}; remove what is damaged to start anew"
        )
    return complete[-1] if complete else None


def _named(path: Path, known: Mapping[Path, str] | None) -> checkpoint_folder.Complete:
    inside = checkpoint_folder.newest(path)
    if inside is not None:
        raise CheckpointError(f"checkpoint.resume: {path} is a run folder; name one of its checkpoints: {inside.path}")
    try:
        return checkpoint_folder.read(path, known)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.resume: {error}") from error


def clear_the_way(
    run: Path, resume: checkpoint_folder.Complete | None, known: Mapping[Path, str] | None = None
) -> list[str]:
    """Before the first step: set aside what an earlier course has left beyond the checkpoint that the run goes on from.

    Returns what a user should know of it.
    """
    damaged = checkpoint_folder.survey(run, known)[1]
    later = [] if resume is None else checkpoint_folder.set_aside(run, resume.step)
    return [*(f"passed over {text}" for text in damaged), *(f"set aside as {path}" for path in later)]


def continued(recipe: Recipe, resume: checkpoint_folder.Complete | None) -> Recipe:
    """The recipe with the global batch that the run has had so far, where it names none and the ranks would decide."""
    stored = None if resume is None else resume.manifest.get("global_batch_size")
    if stored is None or recipe.training.global_batch_size is not None:
        return recipe
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"global_batch_size": stored})})


def changes(before: Recipe, now: Recipe) -> list[str]:
    """What a resumed run changes of its recipe, to be said. Raises CheckpointError if something must not change."""
    differing = [line for line in _differences(before.model_dump(), now.model_dump()) if not _under(line[0], _FREE)]
    refused = [_line(change) for change in differing if not _under(change[0], _DECLARED)]
    if refused:
        raise CheckpointError(
            "the run folder was made by another recipe: "
            + "; ".join(refused)
            + ". Restore these, or name another checkpoint.dir"
        )
    return [_line(change) for change in differing]


def _differences(before: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*before, *now]))
        return [
            d for key in keys for d in _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if before == now else [(path, before, now)]


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _line(change: tuple[str, Any, Any]) -> str:
    path, before, now = change
    return f"{path} was {before!r}, is {now!r}"


def unused(name: str) -> str:
    """`name`, or the first of `name-2`, `name-3`, ... that does not exist."""
    path, number = name, 2
    while Path(path).exists():
        path, number = f"{name}-{number}", number + 1
    return path
