"""Where a run keeps less on its device: what a recipe asks for, and whether it can be had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.errors import Problem, RecipeError
from meshtune.recipes.rounding import SLICED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshtune.layout import Layout
    from meshtune.parallel import Parallel
    from meshtune.recipes.recipe import Recipe

IN_BACKWARD = "optimizer.in_backward"


def problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """What does not go together in any layout."""
    yield from _offload_problems(recipe)
    if recipe.optimizer.in_backward:
        yield from _in_backward_problems(recipe)


def _offload_problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    strategy = recipe.distributed.strategy
    if recipe.training.offload == "parameters" and strategy != "fsdp2":
        yield (
            "training.offload",
            f"parameters needs strategy: fsdp2, which gathers weights as they are used, not {strategy}",
        )
    if recipe.training.offload == "optimizer" and strategy == "megatron_fsdp":
        yield "training.offload", "optimizer is not made for strategy: megatron_fsdp; write `strategy: fsdp2`"
    if recipe.training.offload == "optimizer" and recipe.optimizer.name not in SLICED:
        yield (
            "training.offload",
            f"optimizer works with {', '.join(SLICED)}, whose moments can be fetched a slice at a time, not with "
            f"{recipe.optimizer.name}",
        )


def _in_backward_problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    training, name = recipe.training, recipe.optimizer.name
    if name not in SLICED:
        yield IN_BACKWARD, f"works with {', '.join(SLICED)}, which update each element by itself, not with {name}"
    if training.max_grad_norm is not None:
        yield (
            IN_BACKWARD,
            f"cannot clip by the norm of all gradients (training.max_grad_norm: {training.max_grad_norm}), which is known when "
            "weights have changed; write `max_grad_norm: null`",
        )
    if training.forgives:
        yield IN_BACKWARD, "cannot skip or roll back a step that has changed weights; write `stop` for training.on_..."
    if training.precision == "fp16":
        yield IN_BACKWARD, "cannot leave out a step that overflows in fp16; write `precision: bf16`"
    if recipe.distributed.strategy == "megatron_fsdp":
        yield IN_BACKWARD, "is not made for strategy: megatron_fsdp; write `strategy: fsdp2`"


def check(recipe: Recipe, layout: Layout, device_type: str, accumulation: int) -> None:
    """Raises RecipeError naming what has no effect on this machine or layout, or cannot be done there.

    `accumulation` is how many micro-batches an optimizer step has."""
    found = [*_on_device(recipe, device_type), *_on_layout(recipe, layout, accumulation)]
    if found:
        raise RecipeError([Problem(key, message) for key, message in found])


def check_shared(recipe: Recipe, shared: Sequence[str]) -> None:
    """Raises RecipeError if gradients of parameters are added up over tp when the backward is over, and weights are to be
    changed before."""
    if recipe.optimizer.in_backward and shared:
        message = (
            f"with this tp_size each rank has a part of the gradient of {len(shared)} parameters, {shared[0]} among them; "
            "they are added up after the backward. Leave it out, or tensor parallelism"
        )
        raise RecipeError([Problem(IN_BACKWARD, message)])


def settings(recipe: Recipe) -> dict[str, Any]:
    """What `meshtune.parallel.Settings` is told."""
    training = recipe.training
    asked: dict[str, Any] = {
        "checkpoint_every": training.activation_checkpointing_every,
        "checkpoint_keep": training.activation_checkpointing_keep,
        "activation_offload": training.activation_offload,
        "offload_parameters": training.offload == "parameters",
    }
    return {key: value for key, value in asked.items() if value is not None}


def device_of_weights(recipe: Recipe, device: torch.device) -> torch.device:
    """Where weights are loaded to by a run that computes on `device`."""
    import torch

    return torch.device("cpu") if recipe.training.offload == "parameters" else device


def hold_on_cpu(root: nn.Module, device: torch.device) -> None:
    """Move all parameters of a sharded `root` to the memory of the CPU; buffers are used on `device` as they are."""
    root.to("cpu")
    for module in root.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def in_backward(optimizer: torch.optim.Optimizer, recipe: Recipe, parallel: Parallel) -> torch.optim.Optimizer:
    """`optimizer`, stepped in the backward if `recipe` says so."""
    if not recipe.optimizer.in_backward:
        return optimizer
    from meshtune.optim.in_backward import InBackward

    return InBackward(optimizer, parallel.settled_late)


def _on_device(recipe: Recipe, device_type: str) -> Iterable[tuple[str, str]]:
    if device_type != "cpu":
        return
    why = "moves to the memory of the CPU what is there already: this machine has no accelerator; leave it out"
    if recipe.training.activation_offload:
        yield "training.activation_offload", why
    if recipe.training.offload != "none":
        yield "training.offload", f"{recipe.training.offload} {why}"


def _on_layout(recipe: Recipe, layout: Layout, accumulation: int) -> Iterable[tuple[str, str]]:
    if recipe.training.offload == "parameters" and not _waits_for_copies():
        way = "from torch 2.13 on; upgrade torch, or leave out one of the two"
        if recipe.optimizer.in_backward:
            yield IN_BACKWARD, f"beside offload: parameters reads gradients that have come to the CPU {way}"
        if layout.size("dp_replicate") > 1:
            yield "training.offload", f"parameters beside dp_replicate_size above 1 moves whole gradients {way}"
    if not recipe.optimizer.in_backward:
        return
    if layout.size("pp") > 1:
        yield IN_BACKWARD, "cannot be had with pp_size above 1, where several micro-batches make a gradient"
    elif accumulation > 1:
        yield (
            IN_BACKWARD,
            f"an optimizer step has {accumulation} micro-batches, and a gradient is complete after the last of them; raise "
            f"training.per_device_batch_size {accumulation}-fold, or lower training.global_batch_size",
        )
    if layout.strategy == "ddp" and layout.size("loss") > 1:
        yield IN_BACKWARD, "is not made for strategy: ddp, which adds up gradients over ranks later; write `fsdp2`"


def _waits_for_copies() -> bool:
    """Whether FSDP2 lets nobody read, or overwrite, a gradient that is on its way to the CPU: pytorch/pytorch#180665, #180666."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # which came with the same version
