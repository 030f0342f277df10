"""The course of one process, and layouts beside it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.errors import ModelError
from meshtune.verify import small
from meshtune.verify.compare import Rounding, compare, rounding_of
from meshtune.verify.layouts import Trial
from meshtune.verify.pool import Answer, Pool, first_broken
from meshtune.verify.report import Status, Verdict

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe
    from meshtune.verify.course import Course, Outcome
    from meshtune.verify.miniature import Miniature


class Beside:
    """Runs one process once, and then any layout, from the same weights on the same rows."""

    def __init__(self, pool: Pool, recipe: Recipe, made: Miniature, batch: int, folder: Path):
        """Raises ModelError where training refuses the model on one process."""
        self._pool, self._recipe, self._made, self._batch, self._folder = pool, recipe, made, batch, folder
        self._reference = self._train(None, "one")[0]
        if self._reference.error is not None:
            raise self._reference.error
        outcome: Outcome = self._reference.value
        if outcome.refused is not None:
            raise ModelError(outcome.refused)
        self._courses, self.attention = outcome.courses, outcome.attention

    def attempt(self, trial: Trial) -> Verdict:
        """Train in a layout, and compare."""
        answers = self._train(trial, trial.name, "one")
        broken = first_broken(answers)
        if broken is not None:
            reason = f"{type(broken.error).__name__}: {broken.error}"
            return Verdict(trial.name, trial.ranks, "failing", reason, trace=broken.trace)
        outcomes: list[Outcome] = [answer.value for answer in answers]
        refused = next((outcome.refused for outcome in outcomes if outcome.refused is not None), None)
        if refused is not None:
            return Verdict(trial.name, trial.ranks, "refused", refused)
        ranks = [outcome.courses for outcome in outcomes]
        verdict = self._judge(trial, ranks, {})
        if verdict.status == "failing" and self._rounding:
            verdict = self._judge(trial, ranks, self._rounding)
        return verdict

    def _judge(self, trial: Trial, ranks: Sequence[list[Course]], rounding: dict[str, Rounding]) -> Verdict:
        comparisons = [
            compare(courses, reference, rounding.get(reference.optimizer, Rounding()))
            for courses, reference in zip(zip(*ranks, strict=True), self._courses, strict=True)
        ]
        problems = [f"{one.optimizer}: {problem}" for one in comparisons for problem in one.problems]
        status: Status = "failing" if problems else "exact"
        notes = [one.note for name, one in rounding.items() if one.note] if status == "exact" else []
        return Verdict(trial.name, trial.ranks, status, "\n".join(problems), comparisons, note="\n".join(notes))

    @cached_property
    def _rounding(self) -> dict[str, Rounding]:
        """What rounding alone comes to in this model, by optimizer: one process once more, its batches cut finer."""
        answer = self._train(None, "finer", "one", small.ACCUMULATION * 2)[0]
        if answer.error is not None or answer.value.refused is not None:
            return {}
        pairs = zip(answer.value.courses, self._courses, strict=True)
        return {reference.optimizer: rounding_of(course, reference) for course, reference in pairs}

    def _train(
        self, trial: Trial | None, name: str, reference: str | None = None, accumulation: int = small.ACCUMULATION
    ) -> list[Answer]:
        made, folder = self._made, self._folder
        runs, export = folder / f"runs-{name}", folder / f"export-{name}"
        beside = None if reference is None else str(folder / f"export-{reference}")
        recipes = small.recipes(self._recipe, made.model, made.longest, self._batch, trial, runs, accumulation)
        ranks = 1 if trial is None else trial.ranks
        answers = self._pool.run(ranks, _run, recipes, made.rows, str(export), beside, made.model)
        for done in (runs, *([export] if reference is not None else [])):
            shutil.rmtree(done, ignore_errors=True)
        return answers


def _run(*arguments: object) -> Outcome:
    """Imports torch on the ranks alone."""
    from meshtune.verify.course import run

    return run(*arguments)  # type: ignore[arg-type]
