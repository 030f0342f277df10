"""The recipe of a small model on one layout: what the user's recipe says of model, packing and activations, and what a
comparison needs of everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.config import from_mapping
from meshtune.verify.layouts import Trial

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe

STEPS = 3
ACCUMULATION = 2
# Far above rounding: AdamW divides by the size of a gradient, and would make an update of the noise of a zero.
_OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "sgd": (0.2, {"momentum": 0.9, "weight_decay": 0.0}),
    "adamw": (1e-4, {"eps": 1e-5, "weight_decay": 0.1}),
}
_MAX_GRAD_NORM = 0.1
_KEPT = {
    "model": ("attention", "trust_remote_code"),
    "data": ("packing", "shuffle", "train_path", "format"),
    "training": (
        "activation_checkpointing",
        "activation_checkpointing_every",
        "activation_checkpointing_keep",
    ),
}


def global_batch(readers: Sequence[int]) -> int:
    """Rows of a step that every layout of so many readers shares out alike, in `ACCUMULATION` micro-batches."""
    return ACCUMULATION * math.lcm(4, *readers)


def recipes(
    recipe: Recipe,
    model: str,
    longest: int,
    batch: int,
    trial: Trial | None,
    runs: Path,
    accumulation: int = ACCUMULATION,
) -> list[Recipe]:
    """One for each optimizer; `trial` None is the reference, of one process."""
    from meshtune.recipes.recipe import Recipe as Whole

    readers = 1 if trial is None else trial.readers
    made = []
    for name, (learning_rate, constants) in _OPTIMIZERS.items():
        values: dict[str, dict[str, Any]] = {
            section: {key: getattr(getattr(recipe, section), key) for key in keys} for section, keys in _KEPT.items()
        }
        values["model"] |= {"name": model, "attention": _runnable(recipe.model.attention)}
        values["distributed"] = {} if trial is None else trial.section.model_dump(exclude_defaults=True)
        values["data"] |= {"max_seq_length": longest}
        values["training"] |= {
            "max_steps": STEPS,
            "global_batch_size": batch,
            "per_device_batch_size": batch // readers // accumulation,
            "learning_rate": learning_rate,
            "max_grad_norm": _MAX_GRAD_NORM,
            "precision": "fp32",
        }
        values["optimizer"] = {"name": name, **constants}
        values["lr_scheduler"] = {"name": "constant"}
        values["checkpoint"] = {"dir": str(runs / name), "resume": "never"}
        values["logging"] = {"progress": "none"}
        if recipe.peft is not None:
            values["peft"] = recipe.peft.model_dump(exclude_none=True)
        if recipe.quantization is not None:
            values["quantization"] = recipe.quantization.model_dump(exclude_none=True)
        made.append(from_mapping(Whole, {"recipe": recipe.recipe, "seed": recipe.seed, **values}))
    return made


def _runnable(attention: str) -> str:
    """What runs on a CPU in place of a kernel of an accelerator."""
    return attention if attention in ("sdpa", "eager") else "auto"
