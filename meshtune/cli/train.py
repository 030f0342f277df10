"""`meshtune train`"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshtune.cli.outcome import exits

RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the recipe's, such as training.learning_rate=1e-5.", metavar="[KEY=VALUE]..."),
]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Start so many ranks on this machine.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
) -> None:
    """Train by RECIPE. Under torchrun, joins its world."""
    with exits() as phase:
        from meshtune.config import load
        from meshtune.recipes.recipe import Recipe

        loaded = load(Recipe, str(recipe), overrides or ())
        if nproc is not None and "RANK" not in os.environ:
            from meshtune.launch import launch

            arguments = ["train", str(recipe), *(overrides or ()), *(["--device", device] if device else [])]
            sys.exit(launch(nproc, arguments))
        if nproc is not None:
            raise typer.BadParameter("this process is a rank of torchrun already; leave --nproc to one of them")
        _run(loaded, device, phase.begin_training)


def _run(recipe: object, device: str | None, started: object) -> None:
    from meshtune.cli.quiet import quiet
    from meshtune.launch.rank import report_for_duty

    report_for_duty()
    quiet()
    from meshtune.layout.world import disconnect
    from meshtune.recipes.run import run

    result, _ = run(recipe, device, started=started)
    if os.environ.get("RANK", "0") == "0":
        _say_where(result)
    disconnect()


def _say_where(result: object) -> None:
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
