"""What a recipe's `quantization:` comes to: chosen and checked before any weight is read, then put into the meta model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from meshtune.layout import Layout, Plan
    from meshtune.models.plans.derive import Findings
    from meshtune.models.quantization.choosing import Chosen
    from meshtune.models.source import Source
    from meshtune.models.trainable import Trained
    from meshtune.recipes import adapting
    from meshtune.recipes.recipe import Recipe


def problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """(key, message) of what quantised weights cannot go with in a recipe."""
    if recipe.quantization is None:
        return
    if recipe.distributed.strategy == "megatron_fsdp":
        yield "distributed.strategy", "megatron_fsdp does not hold quantised weights; fsdp2 and ddp do"
    if recipe.quantization.qat:
        if recipe.peft is not None:
            yield "quantization.qat", "trains all weights, which an adapter leaves frozen; leave out `peft:`, or `qat`"
        return
    if recipe.peft is None:
        yield (
            "quantization",
            "quantised weights cannot be trained; add `peft:`, whose adapter is trained beside them, or write `qat: true` to "
            "train weights that are quantised afterwards",
        )
        return
    start = recipe.peft.init_lora_weights or "default"
    if start not in ("default", "gaussian"):
        yield (
            "peft.init_lora_weights",
            f"{start} takes a part out of the weights, which quantised ones cannot give up exactly; write `default`",
        )


def choose(
    recipe: Recipe,
    source: Source,
    adapter: adapting.Chosen | None = None,
    layout: Layout | None = None,
    found: Findings | None = None,
) -> Chosen | None:
    """Which layers of the model of `source` are held in few bits, found on meta; None without `quantization:`.

    `adapter` may train layers whole, which then are not; a `layout`, with what was `found` for it, may not cut them as it would.
    Raises ModelError or LayoutError with what does not fit, before any weight is read.
    """
    if recipe.quantization is None:
        return None
    from meshtune.models import hf
    from meshtune.models.fitting import quantised_in_checkpoint
    from meshtune.models.quantization import choosing
    from meshtune.models.quantization.cuts import quantised_plan
    from meshtune.models.quantization.qat import check_cuts
    from meshtune.models.quantization.watching import weights_read
    from meshtune.recipes.plans import declare

    model = hf.build(source, "eager")
    saved = list((adapter.config.modules_to_save if adapter is not None else None) or [])
    stored = quantised_in_checkpoint(source, model, recipe.quantization.block) if source.files else frozenset()
    chosen = choosing.choose(model, recipe.quantization, saved or None, weights_read(source), stored or None)
    if layout is not None:
        plan = declare(model, found, layout)
        if chosen.trained is not None:
            check_cuts(plan, chosen.layers, chosen.trained, layout)
        choosing.quantise(model, chosen)
        quantised_plan(plan, model, layout)
    return chosen


def put(
    model: PreTrainedModel,
    recipe: Recipe,
    plan: Plan,
    layout: Layout,
    adapter: adapting.Chosen | None,
    quantised: Chosen | None,
) -> Plan:
    """Put an adapter and quantised layers into the bare meta `model`, whose plan is `plan`. Returns the plan of what it is then.

    The adapter comes first: PEFT makes its tensors by the shapes of float weights, and its part of the plan follows from how
    those are cut.
    """
    from meshtune.models.quantization.choosing import quantise
    from meshtune.models.quantization.cuts import quantised_plan
    from meshtune.models.quantization.qat import over_ranks
    from meshtune.recipes import adapting

    if adapter is not None:
        plan = adapting.put(model, recipe, adapter, plan)
    if quantised is not None:
        quantise(model, quantised)
    if quantised is not None and quantised.trained is not None:
        over_ranks(model, plan, layout)
    return quantised_plan(plan, model, layout)


def counted(trained: Trained, model: PreTrainedModel) -> Trained:
    """The same counts, a quantised weight counted as the numbers that it stands for."""
    from meshtune.models.quantization.loading import quantised_layers

    surplus = sum(
        layer.out_features * layer.in_features - sum(tensor.numel() for tensor in layer.held.values())
        for layer in quantised_layers(model).values()
    )
    return replace(trained, total=trained.total + surplus)
