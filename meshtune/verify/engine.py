"""Try layouts: a small model, one course of one process, and each layout's beside it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.config import from_mapping
from meshtune.verify import small
from meshtune.verify.compare import compare
from meshtune.verify.layouts import Trial, choose, most
from meshtune.verify.pool import Answer, Pool, RankLostError
from meshtune.verify.report import Report, Verdict

if TYPE_CHECKING:
    from meshtune.models.source import Source
    from meshtune.recipes.recipe import Recipe
    from meshtune.verify.course import Course, Outcome
    from meshtune.verify.miniature import Miniature


@dataclass(frozen=True)
class Prepared:
    """What is tried: the small model, the layouts, and those that the whole model cannot have, each with the reason."""

    miniature: Miniature
    trials: list[Trial]
    refused: dict[str, str]


def verify(
    recipe: Recipe,
    layouts: str = "auto",
    said: Callable[[Report, Verdict | None], None] = lambda report, verdict: None,
    pool: Pool | None = None,
) -> Report:
    """Try `layouts` (a comma-separated list of names, with `auto` for the usual ones) on `recipe`'s model and data made small.

    `said` is called when the model is ready, and after each layout. Raises MeshtuneError where not even one process could run.
    """
    if pool is None:
        with Pool() as own:
            return verify(recipe, layouts, said, own)
    pool.start(2)
    folder = pool.folder / "small"
    prepared: Prepared = pool.one(prepare, recipe, layouts, folder)
    return compare_layouts(pool, recipe, recipe.model.name, prepared, folder, said)


def prepare(recipe: Recipe, layouts: str, folder: Path) -> Prepared:
    """On a rank: what is tried of a user's recipe."""
    from meshtune.verify import miniature

    source = miniature.source_of(recipe.model)
    return prepare_source(source, recipe, layouts, miniature.documents_of(recipe), folder)


def prepare_source(source: Source, recipe: Recipe, layouts: str, documents: list, folder: Path) -> Prepared:
    """On a rank: the small model of `source`, with documents in its vocabulary."""
    from meshtune.models.shrink import Degrees, has_experts
    from meshtune.verify import miniature

    trials = choose(layouts, recipe.distributed, has_experts(source.config.to_dict()))
    ulysses = [trial for trial in trials if trial.section.cp_method == "ulysses"]
    heads = most(trials, "tp") * (most(ulysses, "cp") if ulysses else 1)
    virtual = 2 if any("interleaved" in (trial.section.pp_schedule or "") for trial in trials) else 1
    layers = max(2, *(trial.section.pp_size * virtual for trial in trials))
    batch = small.global_batch([trial.readers for trial in trials])
    wanted = small.STEPS * batch * miniature.LONGEST
    made = miniature.build(source, Degrees(heads, most(trials, "ep"), layers), documents, wanted, folder)
    return Prepared(made, trials, miniature.refusals(source, trials))


def compare_layouts(
    pool: Pool,
    recipe: Recipe,
    name: str,
    prepared: Prepared,
    folder: Path,
    said: Callable[[Report, Verdict | None], None] = lambda report, verdict: None,
) -> Report:
    """The course of one process, then each layout's beside it. `folder` is emptied in the end."""
    begun = time.perf_counter()
    made = prepared.miniature
    batch = small.global_batch([trial.readers for trial in prepared.trials])
    reference = _reference(pool, recipe, made, batch, folder)
    report = Report(name, made.architecture, made.parameters, made.sizes, recipe.data.packing, reference.attention)
    said(report, None)
    for trial in prepared.trials:
        start = time.perf_counter()
        if trial.name in prepared.refused:
            verdict = Verdict(trial.name, trial.ranks, "refused", prepared.refused[trial.name])
        else:
            verdict = _try(pool, recipe, made, batch, trial, folder, reference.courses)
        verdict.seconds = time.perf_counter() - start
        report.verdicts.append(verdict)
        said(report, verdict)
    shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.perf_counter() - begun
    return report


def _reference(pool: Pool, recipe: Recipe, made: Miniature, batch: int, folder: Path) -> Outcome:
    from meshtune.errors import ModelError

    recipes = small.recipes(recipe, made.model, made.longest, batch, None, folder / "one")
    outcome: Outcome = pool.one(_run, recipes, made.rows, str(folder / "reference"), None, made.model)
    if outcome.refused is not None:
        raise ModelError(outcome.refused)
    return outcome


def _try(
    pool: Pool, recipe: Recipe, made: Miniature, batch: int, trial: Trial, folder: Path, reference: list[Course]
) -> Verdict:
    runs = folder / f"runs-{trial.name}"
    recipes = small.recipes(recipe, made.model, made.longest, batch, trial, runs)
    folders = str(folder / f"export-{trial.name}"), str(folder / "reference")
    answers = pool.run(trial.ranks, _run, recipes, made.rows, *folders, made.model)
    for done in (runs, Path(folders[0])):
        shutil.rmtree(done, ignore_errors=True)
    broken = _first_broken(answers)
    if broken is not None:
        reason = f"{type(broken.error).__name__}: {broken.error}"
        return Verdict(trial.name, trial.ranks, "failing", reason, trace=broken.trace)
    outcomes: list[Outcome] = [answer.value for answer in answers]
    refused = next((outcome.refused for outcome in outcomes if outcome.refused is not None), None)
    if refused is not None:
        return Verdict(trial.name, trial.ranks, "refused", refused)
    by_optimizer = zip(*(outcome.courses for outcome in outcomes), strict=True)
    comparisons = [compare(ranks, one) for ranks, one in zip(by_optimizer, reference, strict=True)]
    problems = [f"{one.optimizer}: {problem}" for one in comparisons for problem in one.problems]
    return Verdict(trial.name, trial.ranks, "failing" if problems else "exact", "\n".join(problems), comparisons)


def _first_broken(answers: Iterable[Answer]) -> Answer | None:
    """The others fail because their peer has gone: the first is the cause."""
    broken = [answer for answer in answers if answer.error is not None]
    return min(broken, key=lambda answer: (isinstance(answer.error, RankLostError), answer.at), default=None)


def _run(*arguments: object) -> Outcome:
    from meshtune.verify.course import run

    return run(*arguments)  # type: ignore[arg-type]


def synthetic(model_type: str, packing: bool) -> Recipe:
    """A recipe of a model that is known by its config alone."""
    from meshtune.recipes.recipe import Recipe as Whole

    sections = {"model": {"name": model_type, "weights": "random"}, "training": {"learning_rate": 1e-3}}
    return from_mapping(Whole, {**sections, "data": {"train_path": "rows.jsonl", "packing": packing}})
