"""`meshtune export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshtune.cli.outcome import exits


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    to: Annotated[Path, typer.Option(help="The folder to write, in Hugging Face form.")],
    step: Annotated[
        str | None, typer.Option(help="The checkpoint's step, or best, by checkpoint.best_metric. Default: the newest.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: as the recipe says.")
    ] = None,
) -> None:
    """Write a checkpoint of RUN as a Hugging Face folder."""
    with exits():
        from meshtune.cli.quiet import quiet

        quiet()
        from meshtune.layout.world import disconnect
        from meshtune.recipes.exporting import export_checkpoint

        source, damaged = export_checkpoint(run, to, step, dtype)
        disconnect()
        for text in damaged:
            print(f"passed over {text}")
        print(f"exported {source} to {to}")
