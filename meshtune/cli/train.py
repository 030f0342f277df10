"""`meshtune train`"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.outcome import exits

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import RunResult

RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace the recipe's, such as training.learning_rate=1e-5.", metavar="[KEY=VALUE]..."
    ),
]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Start so many ranks on this machine.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
) -> None:
    """Train by RECIPE. Under torchrun, joins its world."""
    with exits() as phase:
        from meshtune.launch.rank import report_for_duty

        report_for_duty()
        phase.recipe = (recipe, overrides or ())
        loaded = _load(recipe, overrides, nproc)
        if nproc is None:
            _run(loaded, device, phase.begin_training)
    if nproc is not None:
        from meshtune.launch import launch

        arguments = ["train", str(recipe), *(overrides or ()), *(["--device", device] if device else [])]
        raise typer.Exit(launch(nproc, arguments))


def _load(recipe: Path, overrides: list[str] | None, nproc: int | None) -> Recipe:
    from meshtune.config import load
    from meshtune.errors import RecipeError
    from meshtune.recipes.recipe import Recipe

    if nproc is not None and "RANK" in os.environ:
        raise RecipeError("--nproc: this process is a rank of torchrun already, which says how many there are")
    return load(Recipe, str(recipe), overrides or ())


def _run(recipe: Recipe, device: str | None, started: Callable[[], None]) -> None:
    from meshtune.cli.quiet import quiet

    quiet()
    from meshtune.launch.rank import report_exit
    from meshtune.layout.world import disconnect
    from meshtune.recipes.run import run

    result, _ = run(recipe, device, started=started)
    report_exit(0)  # the launcher need not wonder where this rank has gone
    if os.environ.get("RANK", "0") == "0":
        _say_where(result)
    disconnect()


def _say_where(result: RunResult) -> None:
    rows = [
        ("model", result.export),
        ("loss curve", result.run / "loss.png"),
        ("report", result.run / "report.html"),
        ("metrics", result.run / "metrics.jsonl"),
    ]
    print(f"done, {result.state.step} steps")
    for name, path in rows:
        if path is not None:
            print(f"  {name:<11} {path}")
