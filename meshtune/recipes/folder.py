"""The run folder: what a run leaves beside its checkpoints, and whether it may continue what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshtune.checkpoint import folder as checkpoint_folder
from meshtune.config import dump, load
from meshtune.errors import CheckpointError
from meshtune.observe import environment
from meshtune.recipes.recipe import Recipe

RESOLVED = "recipe.resolved.yaml"

# Settings that a resumed run may change: they alter what is kept and shown, how the work is cut, or how long it goes on.
_FREE = (
    "distributed",
    "checkpoint",
    "logging",
    "training.per_device_batch_size",
    "training.activation_checkpointing",
    "training.compile",
    "training.eval_every_steps",
    "data.validation_path",
    "data.validation_split",
    "model.attention",
)
# Settings that change the numbers from here on; allowed, and said.
_DECLARED = ("training", "optimizer", "lr_scheduler")


def write_facts(run: Path, recipe: Recipe, layout: dict[str, Any], data: dict[str, Any]) -> None:
    """`recipe.resolved.yaml`, `layout.json`, `data.json`, `environment.json`."""
    run.mkdir(parents=True, exist_ok=True)
    _write(run / RESOLVED, dump(recipe))
    for name, values in (("layout", layout), ("data", data), ("environment", environment())):
        _write(run / f"{name}.json", json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def resolved_recipe(run: Path) -> Recipe:
    """The recipe that a run folder was made by. Raises CheckpointError if it is not a run folder."""
    file = run / RESOLVED
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no {RESOLVED}")
    return load(Recipe, str(file))


def find_resume(recipe: Recipe, run: Path) -> checkpoint_folder.Complete | None:
    """The checkpoint to continue from, or None to start anew. Raises CheckpointError if neither would be right."""
    wanted = recipe.checkpoint.resume_from
    if wanted not in ("auto", "never"):
        return checkpoint_folder.read(Path(wanted))
    checkpoint_folder.sweep(run)
    newest = checkpoint_folder.newest(run)
    if wanted == "never" and newest is not None:
        raise CheckpointError(
            f"checkpoint.resume: never, but {run} holds checkpoints up to step {newest.step}; name another checkpoint.dir, or "
            "remove them"
        )
    bad = checkpoint_folder.damaged(run)
    if newest is None and bad:
        raise CheckpointError(f"no complete checkpoint to resume from in {run}: {bad[0][1]}; remove it to start anew")
    return newest


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
