"""`meshtune verify`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.outcome import exits
from meshtune.cli.train import Overrides, RecipePath

if TYPE_CHECKING:
    from meshtune.verify.report import Report, Verdict


def verify(
    recipe: RecipePath,
    overrides: Overrides = None,
    layouts: Annotated[
        str, typer.Option(help="auto, or names such as fsdp2,hsdp,tp2+sp,fsdp2xtp2; auto may stand among them.")
    ] = "auto",
    to: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
) -> None:
    """Train RECIPE's model, made small, on local CPU ranks in each layout, and compare with one process."""
    with exits() as phase:
        phase.recipe = (recipe, overrides or ())
        from meshtune.config import load
        from meshtune.observe.chatter import hush
        from meshtune.recipes.recipe import Recipe
        from meshtune.verify.engine import verify as compare_all

        hush()
        loaded = load(Recipe, str(recipe), overrides or ())
        report = compare_all(loaded, layouts, _say)
        if to is not None:
            text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n"
            to.write_text(text, encoding="utf-8")
    print(_summary(report))
    if not report.passed:
        raise typer.Exit(1)


def _say(report: Report, verdict: Verdict | None) -> None:
    from meshtune.verify.report import headline, lines

    print("\n".join(headline(report) if verdict is None else lines(verdict)), flush=True)


def _summary(report: Report) -> str:
    counts = {status: sum(v.status == status for v in report.verdicts) for status in ("exact", "refused", "failing")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{told}; {report.seconds:.0f} s"
