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
from meshtune.models.causal_lm import CausalLM
from meshtune.models.documents import reopening
from meshtune.models.initialize import fill, initialize
from meshtune.observe import compute_dtype, training_flops_per_token
from meshtune.parallel import Parallel, Settings, replicate, shard
from meshtune.recipes import memory, precision
from meshtune.recipes.objectives import next_token, next_token_scores
from meshtune.recipes.plans import declare
from meshtune.recipes.rounding import rounded
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

    from meshtune.recipes.run import Setup


def build_model(setup: Setup, weights: Mapping[str, torch.Tensor] | None) -> tuple[CausalLM, Parallel]:
    """Meta model, plan, shards, weights. Of a run that is resumed, the checkpoint will fill the parameters."""
    source, device = setup.plan.source, setup.world.device
    training = setup.recipe.training
    model = hf.build(source, setup.attention.implementation)
    root = CausalLM(model, whole=setup.attention.whole)
    plan = declare(model, setup.findings, setup.layout)
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
        _active_share(model.config.get_text_config(decoder=True)),
        **memory.settings(setup.recipe),
        float8=float8,
    )
    setup.flops_per_token = _flops_per_token(setup, model)
    sharded = shard(root, model, setup.layout, plan, settings)
    memory.check_shared(setup.recipe, sharded.shared)
    if setup.resume is not None:
        initialize(model, None, device)
    elif weights is not None:
        initialize(model, None, device)
        fill(model, weights)
    elif source.section.weights == "random":
        initialize(model, setup.recipe.seed, device)
    else:
        setup.world.all_together(lambda: hf.load(model, source, device))
    return root, replicate(root, model, setup.layout, sharded, settings)


def assemble(setup: Setup, parallel: Parallel, stop: SignalStop) -> tuple[Fit, TrainState, Reporter]:
    """Optimizer, order, checkpoints and the reporter, and the state that a checkpoint left."""
    recipe, layout, device = setup.recipe, setup.layout, setup.world.device
    model = setup.model.model
    optimizer = recipe.optimizer.build(model.named_modules(), recipe.training.learning_rate)
    optimizer = memory.in_backward(rounded(optimizer, recipe, model), recipe, parallel)
    loader = Loader(setup.course.order, **_share(setup))
    group = background_group() if recipe.checkpoint.asynchronous else None
    keeper = Checkpointer(setup.run, model, optimizer, recipe.checkpoint.keep, group)
    setup.world.from_first(lambda: check_space(setup.run, bytes_needed(model, optimizer)))
    saver, guard = RunSaver(setup, keeper), recipe.training.guard()
    loss_scale = LossScale() if compute_dtype(setup.precision) == torch.float16 else None
    state = TrainState()
    if setup.resume is not None:
        state = saver.resume(setup.resume.path)
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
        validate=_validator(setup, parallel),
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


def _validator(setup: Setup, parallel: Parallel) -> Any:
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


def _flops_per_token(setup: Setup, model: PreTrainedModel) -> float:
    """Of a dense model. A mixture of experts is counted by its active share of expert parameters."""
    data = setup.train_data
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    head_size = sum(p.numel() for p in head.parameters())
    embedding = {id(p) for p in (*model.get_input_embeddings().parameters(), *head.parameters())}
    active = _active_share(config)
    body = sum(
        p.numel() * (active if ".experts." in name else 1.0)
        for name, p in model.named_parameters()
        if id(p) not in embedding
    )
    heads = getattr(config, "num_attention_heads", 0)
    size = heads * (config.to_dict().get("head_dim") or config.hidden_size // max(heads, 1))
    layers = getattr(config, "num_hidden_layers", 0)
    return training_flops_per_token(int(body), layers, size, data.mean_length, head_size, data.supervised_share)


def _active_share(config: Any) -> float:
    experts = precision.experts_of(config) or 1
    return min(1.0, (getattr(config, "num_experts_per_tok", None) or experts) / experts)
