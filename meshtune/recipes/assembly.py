"""Join the rooms: a model in its shards, an optimizer, a loader, a loop. Top to bottom, in the order of the data flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.checkpoint.space import bytes_needed, check_space
from meshtune.data.loader import Loader, validation_batches
from meshtune.data.order import GlobalOrder
from meshtune.layout.world import background_group
from meshtune.models import hf
from meshtune.models.adapters.view import base_view, kept_of
from meshtune.models.causal_lm import CausalLM
from meshtune.models.documents import reopening
from meshtune.models.initialize import fill, initialize
from meshtune.models.trainable import freeze
from meshtune.observe import compute_dtype
from meshtune.parallel import Parallel, Settings, replicate, shard
from meshtune.recipes import adapting, memory, optimizing, precision, quantizing
from meshtune.recipes.arithmetic import active_share, flops_per_token, sizes
from meshtune.recipes.objectives import next_token, next_token_scores
from meshtune.recipes.plans import declare
from meshtune.recipes.rounding import sliced
from meshtune.recipes.saving import RunSaver
from meshtune.training.best import BestMetric
from meshtune.training.loop import Fit
from meshtune.training.loss_scale import LossScale
from meshtune.training.reporting import Reporter
from meshtune.training.requests import Requests
from meshtune.training.signals import SignalStop
from meshtune.training.state import TrainState
from meshtune.training.step import TrainStep, validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from meshtune.models.source import Source
    from meshtune.recipes.run import Setup


def build_model(setup: Setup, weights: Mapping[str, torch.Tensor] | None) -> tuple[CausalLM, Parallel]:
    """Meta model, plan, quantised layers, adapter, shards, weights, what is frozen: in this order.

    The plan is that of the bare model, whose blocks were tried. Stages are cut by what gradients reach, and loading lets every
    weight require one, so that freezing comes after both. Of a run that is resumed, the checkpoint fills what is trained.
    """
    adapter, device = setup.adapter, setup.world.device
    training = setup.recipe.training
    source = adapting.held(setup.plan.source, setup.recipe, compute_dtype(setup.precision))
    setup.base = setup.world.from_first(lambda: adapting.base_of(setup.recipe, source, weights, setup.resume))
    model = hf.build(source, setup.attention.implementation)
    root = CausalLM(model, whole=setup.attention.whole)
    plan = declare(model, setup.findings, setup.layout)
    whole = sizes(model)
    plan = quantizing.put(model, setup.recipe, plan, setup.layout, adapter, setup.quantised)
    setup.trained = adapting.trained(model, setup.recipe.model)
    if setup.trained is not None:
        setup.trained = quantizing.counted(setup.trained, model)
    setup.learning = optimizing.choose(setup.recipe, model, setup.trained)
    setup.world.from_first(lambda: optimizing.say(setup))
    float8 = precision.chosen(setup.recipe, device, model, plan, setup.layout)
    if float8 is not None and setup.world.is_first:
        print(f"fp8         {float8.summary()}", flush=True)
    settings = Settings(
        compute_dtype(setup.precision),
        training.activation_checkpointing,
        training.compile,
        reopening,
        setup.recipe.distributed.pp_schedule or "1f1b",
        setup.recipe.distributed.pp_microbatches,
        active_share(model.config.get_text_config(decoder=True)),
        **memory.settings(setup.recipe),
        float8=float8,
    )
    if setup.trained is not None:
        whole = adapting.sizes_of(model, whole, setup.trained)
    data = setup.train_data
    setup.flops_per_token = flops_per_token(model, whole, data.mean_length, data.supervised_share)
    sharded = shard(root, model, setup.layout, plan, settings)
    memory.check_shared(setup.recipe, sharded.shared)
    _fill(setup, model, source, weights)
    if adapter is not None:
        adapting.fill(setup, model, sharded.plan)
    if settings.offload_parameters:
        memory.hold_on_cpu(root, device)
    if setup.trained is not None:
        freeze(model, setup.trained)
    return root, replicate(root, model, setup.layout, sharded, settings)


def _fill(setup: Setup, model: PreTrainedModel, source: Source, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Give the model's own weights their values; where the checkpoint to resume from holds them all, storage."""
    base, device = base_view(model), memory.device_of_weights(setup.recipe, setup.world.device)
    if setup.resume is not None and setup.adapter is None:
        initialize(base, None, device)
    elif weights is not None:
        initialize(base, None, device)
        fill(base, weights)
    elif source.section.weights == "random":
        initialize(base, setup.recipe.seed, device)
    else:
        setup.world.all_together(lambda: hf.load(base, source, device))


def assemble(setup: Setup, parallel: Parallel, stop: SignalStop) -> tuple[Fit, TrainState, Reporter]:
    """Optimizer, order, checkpoints and the reporter, and the state that a checkpoint left."""
    recipe, layout, device = setup.recipe, setup.layout, setup.world.device
    model = setup.model.model
    optimizer = optimizing.build(recipe, model, setup.learning, layout)
    optimizer = memory.in_backward(sliced(optimizer, recipe, model), recipe, parallel)
    setup.optimizer = optimizer
    loader = Loader(setup.course.order, **_share(setup))
    group = background_group() if recipe.checkpoint.asynchronous else None
    kept = kept_of(model)
    keeper = Checkpointer(setup.run, model, optimizer, recipe.checkpoint.keep, group, kept)
    setup.world.from_first(lambda: check_space(setup.run, bytes_needed(model, optimizer, kept)))
    saver, guard = RunSaver(setup, keeper, optimizer), recipe.training.guard()
    loss_scale = LossScale() if compute_dtype(setup.precision) == torch.float16 else None
    state = TrainState()
    if setup.resume is not None:
        state = saver.resume(setup.resume.path)
        adapting.take_part(model)
        loader.load_state_dict(state.loader)
        guard.load_state_dict(state.guard)
        if loss_scale is not None:
            loss_scale.load_state_dict(state.loss_scale)
    step = TrainStep(
        parallel,
        setup.model,
        next_token,
        optimizer,
        layout,
        device,
        recipe.training.max_grad_norm,
        recipe.seed,
        lambda: Requests(*stop.requested(), int(saver.is_due()), int(saver.has_failed())),
        guard,
        loss_scale,
    )
    parts = Fit(
        step=step,
        loader=loader,
        learning_rate=lambda k: recipe.training.learning_rate * setup.course.factor(k),
        total_steps=setup.course.total_steps,
        saver=saver,
        save_every=recipe.checkpoint.every_steps,
        guard=guard,
        loss_scale=loss_scale,
        best=BestMetric.named(recipe.checkpoint.best_metric),
        validate=_validator(setup, parallel, optimizer),
        validate_every=recipe.training.eval_every_steps,
        validate_every_epochs=recipe.training.eval_every_epochs,
    )
    return parts, state, _reporter(setup)


def _share(setup: Setup) -> dict[str, int]:
    return {
        "rank": setup.layout.rank("batch"),
        "world_size": setup.layout.size("batch"),
        "per_device_batch_size": setup.plan.sizes.per_device_batch_size,
        "pad_token_id": setup.plan.pad_token_id,
    }


def _validator(setup: Setup, parallel: Parallel, optimizer: torch.optim.Optimizer) -> Any:
    orders = {
        name: GlobalOrder(
            data,
            setup.plan.sizes.global_batch_size,
            shuffle=False,
            packing=setup.recipe.data.packing,
            max_seq_length=setup.plan.max_seq_length,
            options=setup.recipe.data.packing_options,
        )
        for name, data in setup.validation_data.items()
    }

    def run() -> dict[str, float | int]:
        metrics = {}
        for name, order in orders.items():
            batches = validation_batches(order, **_share(setup))
            with optimizing.evaluated(optimizer, setup.model):
                found = validate(parallel, setup.model, next_token_scores, batches, setup.layout, setup.world.device)
            metrics.update({"_".join(filter(None, ("validation", name, key))): value for key, value in found.items()})
        return metrics

    return run if orders else None


def _reporter(setup: Setup) -> Reporter:
    return Reporter(
        setup.recipe.logging,
        setup.run,
        setup.world.rank,
        setup.world.size,
        setup.world.device,
        setup.flops_per_token,
        setup.peak_flops,
    )
