"""`meshtune init`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshtune.cli.outcome import exits

_STARTER: dict[str, Any] = {
    "recipe": "sft",
    "model": {"name": "Qwen/Qwen3-0.6B"},
    "distributed": {"strategy": "fsdp2"},
    "data": {"train_path": "data/train.jsonl", "max_seq_length": 2048, "packing": True},
    "training": {"epochs": 3, "learning_rate": 1e-5, "global_batch_size": 16, "per_device_batch_size": 1},
    "optimizer": {"name": "adamw"},
    "lr_scheduler": {"name": "cosine", "warmup_ratio": 0.03},
    "checkpoint": {"every_steps": 200},
    "logging": {"every_steps": 1},
}


def init(
    name: Annotated[str, typer.Argument(help="The recipe's name; NAME.yaml is written here.", metavar="NAME")],
) -> None:
    """Write a commented starter recipe."""
    with exits():
        from meshtune.config import starter
        from meshtune.errors import RecipeError
        from meshtune.recipes.recipe import Recipe

        path = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if path.exists():
            raise RecipeError(f"{path} exists already; choose another name, or remove it")
        values = {**_STARTER, "checkpoint": {"dir": f"runs/{path.stem}", **_STARTER["checkpoint"]}}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(starter(Recipe, values), encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"{path} cannot be written: {error.strerror}") from error
        print(f"wrote {path}; next: meshtune check {path}")
