"""What `meshtune check` looks at: recipe, layout, model files, tokenizer, first rows, and the attention that would run."""

from __future__ import annotations

from pathlib import Path

import torch

from meshtune.checkpoint.folder import Complete
from meshtune.layout.world import own_device_type
from meshtune.models import hf
from meshtune.models.proofs import choose_attention
from meshtune.recipes import adapting, optimizing, planning, precision, quantizing, rounding
from meshtune.recipes.explaining import stage_holders
from meshtune.recipes.folder import changes, continued, find_resume, resolved_recipe
from meshtune.recipes.plans import declare, find_plan
from meshtune.recipes.recipe import Recipe


def inspect(recipe: Recipe, world_size: int) -> tuple[Recipe, list[str]]:
    """The recipe resolved for `world_size` ranks, and what was found, as lines. Raises MeshtuneError for what would not run."""
    from meshtune.data.opening import Opening
    from meshtune.recipes.run import cache_folder

    recipe = planning.with_folder(recipe)
    resume = find_resume(recipe, Path(recipe.checkpoint.dir or ""))
    device = torch.device(own_device_type())
    plan = planning.plan(continued(recipe, resume), world_size, device.type)
    section = plan.recipe.rows
    attention = choose_attention(
        plan.source,
        section.packing,
        torch.device("cpu"),
        torch.float32,
        longest_row=plan.longest_row,
        preferred=None if resume is None else resume.manifest.get("attention"),
        context=plan.context,
        longest_document=plan.max_seq_length,
    )
    found = find_plan(plan.source, plan.layout, plan.recipe.distributed.plan)
    adapter = adapting.choose(plan.recipe, plan.source, plan.tokenizer)
    source = adapting.held(plan.source, plan.recipe, torch.float32)
    quantised = quantizing.choose(plan.recipe, source, adapter, plan.layout, found)
    model = hf.build(source, "eager")
    declared = declare(model, found, plan.layout)
    declared = quantizing.put(model, plan.recipe, declared, plan.layout, adapter, quantised)
    trained = optimizing.lines_of(plan.recipe, model)
    float8 = precision.chosen(plan.recipe, device, model, declared, plan.layout)
    stage_holders(model, declared, plan.layout, plan.recipe.distributed.pp_schedule or "1f1b")
    lines = [
        plan.layout.summary(),
        *(found.notes() if found is not None else []),
        plan.sizes.summary(),
        *(f"adapter     {line}" for line in (adapter.lines() if adapter is not None else [])),
        *(quantised.lines if quantised is not None else ()),
        *trained,
        *(() if float8 is None else [f"fp8         {float8.summary()}"]),
        *rounding.notes(plan.recipe),
        f"attention on this machine: {attention.description}",
        f"longest row: {plan.max_seq_length} tokens",
        *_resuming(plan.recipe, resume),
    ]
    opening = Opening(section, plan.tokenizer, plan.max_seq_length, plan.vocabulary, cache_folder() / "data")
    lines += opening.preview()
    return plan.recipe, lines


def _resuming(recipe: Recipe, resume: Complete | None) -> list[str]:
    """From where training would go on, and with what change. Raises CheckpointError if it may not."""
    if resume is None:
        return []
    changed = changes(continued(resolved_recipe(resume.path.parent.parent), resume), recipe)
    return [f"would resume from {resume.path}", *(f"changed: {line}" for line in changed)]
