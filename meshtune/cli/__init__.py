"""The `meshtune` command. One file a subcommand; heavy imports stay inside them, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.cli.check import check
from meshtune.cli.explain import explain
from meshtune.cli.export import export
from meshtune.cli.init import init
from meshtune.cli.outcome import leave
from meshtune.cli.prepare import prepare
from meshtune.cli.schema import schema
from meshtune.cli.train import train
from meshtune.cli.verify import verify

app = typer.Typer(
    name="meshtune",
    help="Train and fine-tune any Hugging Face language model on any mesh, from one recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, check, prepare, explain, verify, export, init, schema):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        from meshtune import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SystemExit as leaving:
        leave(leaving.code)
