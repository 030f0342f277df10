"""Try layouts: a small model, one course of one process, and each layout's beside it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.config import from_mapping
from meshtune.errors import ModelError
from meshtune.verify import small
from meshtune.verify.beside import Beside
from meshtune.verify.layouts import Trial, choose, most
from meshtune.verify.layouts import own as own_layout
from meshtune.verify.pool import Pool
from meshtune.verify.report import Report, Verdict

if TYPE_CHECKING:
    from meshtune.models.adapters.section import AdapterSection
    from meshtune.models.quantization.section import QuantizationSection
    from meshtune.models.source import Source
    from meshtune.recipes.recipe import Recipe
    from meshtune.verify.miniature import Miniature


@dataclass(frozen=True)
class Prepared:
    """What is tried: the small model, the layouts, those that the whole model cannot have, each with the reason, and adapter and
    quantised weights in the form that they have for the small model."""

    miniature: Miniature
    trials: list[Trial]
    refused: dict[str, str]
    experts: bool
    peft: AdapterSection | None = None
    quantization: QuantizationSection | None = None


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
    return compare_layouts(pool, recipe, recipe.model.name, prepared, folder, said, own_layout(recipe.distributed))


def prepare(recipe: Recipe, layouts: str, folder: Path) -> Prepared:
    """On a rank: what is tried of a user's recipe."""
    from meshtune.verify import miniature

    source = miniature.source_of(recipe.model, recipe.quantization)
    prepared = prepare_source(source, recipe, layouts, miniature.documents_of(recipe), folder)
    if recipe.peft is None and recipe.quantization is None:
        return prepared
    from meshtune.verify import adapters, quantised

    made = prepared.miniature.model
    return replace(
        prepared,
        peft=adapters.made_small(recipe, source, made),
        quantization=quantised.made_small(recipe, source, made),
        refused={**quantised.refusals(recipe, source, prepared.trials), **prepared.refused},
    )


def prepare_source(source: Source, recipe: Recipe, layouts: str, documents: list, folder: Path) -> Prepared:
    """On a rank: the small model of `source`, with documents in its vocabulary."""
    from meshtune.models.shrink import Degrees, has_experts
    from meshtune.verify import miniature

    experts = has_experts(source.config.to_dict())
    trials = choose(layouts, recipe.distributed, experts)
    ulysses = [trial for trial in trials if trial.section.cp_method == "ulysses"]
    heads = most(trials, "tp") * (most(ulysses, "cp") if ulysses else 1)
    virtual = 2 if any("interleaved" in (trial.section.pp_schedule or "") for trial in trials) else 1
    layers = max(2, *(trial.section.pp_size * virtual for trial in trials))
    batch = small.global_batch([trial.readers for trial in trials])
    wanted = small.STEPS * batch * miniature.LONGEST
    made = miniature.build(source, Degrees(heads, most(trials, "ep"), layers), documents, wanted, folder)
    return Prepared(made, trials, miniature.refusals(source, trials), experts)


def compare_layouts(
    pool: Pool,
    recipe: Recipe,
    name: str,
    prepared: Prepared,
    folder: Path,
    said: Callable[[Report, Verdict | None], None] = lambda report, verdict: None,
    own: str = "",
) -> Report:
    """The course of one process, then each layout's beside it, `own` being the recipe's. `folder` is emptied in the end."""
    begun = time.perf_counter()
    made, qat = prepared.miniature, recipe.quantization is not None and recipe.quantization.qat
    recipe = recipe.model_copy(update={"peft": prepared.peft, "quantization": prepared.quantization})
    beside = Beside(pool, recipe, made, small.global_batch([trial.readers for trial in prepared.trials]), folder)
    facts = made.architecture, made.parameters, made.sizes, prepared.experts
    report = Report(name, *facts, recipe.data.packing, beside.attention, own=own)
    report.quantised, report.qat = prepared.quantization is not None, qat
    said(report, None)
    for trial in prepared.trials:
        start = time.perf_counter()
        if trial.name in prepared.refused:
            verdict = Verdict(trial.name, trial.ranks, "refused", prepared.refused[trial.name])
        else:
            verdict = beside.attempt(trial)
        verdict.seconds = time.perf_counter() - start
        report.verdicts.append(verdict)
        said(report, verdict)
    shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.perf_counter() - begun
    return report


def verify_config(pool: Pool, model_type: str, values: dict[str, Any], layouts: str) -> Report:
    """Try `layouts` on a model that is known by its config alone: class defaults but for `values`. The rows are made up, and
    packed where one process can train this architecture on packed rows.

    Raises MeshtuneError where not even one process could run.
    """
    folder = pool.folder / "small"
    recipe = _synthetic(model_type, packing=True)
    prepared: Prepared = pool.one(_prepare_config, model_type, values, recipe, layouts, folder)
    try:
        return compare_layouts(pool, recipe, model_type, prepared, folder)
    except ModelError:
        return compare_layouts(pool, _synthetic(model_type, packing=False), model_type, prepared, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare_config(model_type: str, values: dict[str, Any], recipe: Recipe, layouts: str, folder: Path) -> Prepared:
    from transformers import AutoConfig

    from meshtune.models.source import Source, causal_lm
    from meshtune.verify.miniature import random_documents

    model_class, config = causal_lm(AutoConfig.for_model(model_type, **values))
    source = Source(recipe.model, model_type, config, model_class)
    return prepare_source(source, recipe, layouts, random_documents(), folder)


def _synthetic(model_type: str, packing: bool) -> Recipe:
    from meshtune.recipes.recipe import Recipe as Whole

    sections = {"model": {"name": model_type, "weights": "random"}, "training": {"learning_rate": 1e-3}}
    return from_mapping(Whole, {**sections, "data": {"train_path": "rows.jsonl", "packing": packing}})
