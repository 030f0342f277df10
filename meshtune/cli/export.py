"""`meshtune export`"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from meshtune.cli.outcome import exits
from meshtune.errors import RecipeError


class Base(Enum):
    """What adapters of a run with quantised weights are merged into."""

    QUANTIZED = "quantized"
    ORIGINAL = "original"


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    to: Annotated[Path, typer.Option(help="The folder to write, in Hugging Face form.")],
    step: Annotated[
        str | None, typer.Option(help="The checkpoint's step, or best, by checkpoint.best_metric. Default: the newest.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: as the recipe says.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the model with the run's adapter merged in, not the adapter.")
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="With --merge: a further adapter, a folder or hub id in PEFT's form. Again for each, in order."
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(
            help="With --merge: how much of an adapter is taken. Once for each, the run's own first. Default 1."
        ),
    ] = None,
    base: Annotated[
        Base | None,
        typer.Option(
            help="With --merge, of a run with quantised weights: merge into these (the default), or into the original ones."
        ),
    ] = None,
) -> None:
    """Write a checkpoint of RUN as a Hugging Face folder: the model, or the adapter where one was trained."""
    with exits():
        from meshtune.cli.quiet import quiet

        quiet()
        from meshtune.layout.world import disconnect
        from meshtune.recipes.exporting import export_checkpoint
        from meshtune.recipes.merging import Merge

        if not merge and (adapter or weight or base):
            option = "--adapter" if adapter else "--weight" if weight else "--base"
            raise RecipeError(f"{option} has no effect without --merge")
        asked = Merge(tuple(adapter or ()), tuple(weight or ()), base.value if base else None) if merge else None
        done = export_checkpoint(run, to, step, dtype, asked)
        disconnect()
        for text in done.passed_over:
            print(f"passed over {text}")
        print(f"exported {done.checkpoint} to {to}")
        for text in done.notes:
            print(text)
