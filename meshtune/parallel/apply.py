"""Apply a plan to a model on a layout. This file holds THE order:

    pipeline cut, adapters, tensor and sequence parallelism, expert parallelism, context-parallel attention,
    activation checkpointing, compile, data parallelism

of which this version has the last three; each of the others takes its place in `shard` as one call. `shard` works on the
meta device, before any weight exists. DDP needs real storage, so `replicate` is called after the weights are loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshtune.layout import Layout, Plan
from meshtune.parallel.activation_checkpointing import Mode, checkpoint_activations
from meshtune.parallel.compile import compile_units
from meshtune.parallel.replicas import Replicas
from meshtune.parallel.shards import Shards


@dataclass(frozen=True)
class Settings:
    """What a recipe asks for beyond the mesh."""

    compute_dtype: torch.dtype = torch.float32
    activation_checkpointing: Mode = "none"
    compile: bool = False


def shard(root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings) -> None:
    """Everything that can be done before weights are loaded, in place.

    `root` is the module whose forward runs training (it contains `model`, the transformers model); it becomes the root of
    data parallelism, so that whatever its forward does with parameters is inside.
    """
    names = plan.units([name for name, _ in model.named_modules()])
    units = [model.get_submodule(name) for name in names]
    checkpoint_activations(model, settings.activation_checkpointing)
    if settings.compile:
        compile_units(units, layout.device_type)
    if layout.strategy == "fsdp2":
        for module in (*units, root):
            fully_shard(module, mesh=layout.data_parallel_mesh, mp_policy=_mixed_precision(settings))


def replicate(root: nn.Module, layout: Layout, settings: Settings) -> Parallel:
    """After the weights are loaded: hand out the module to call, which DDP wraps where the layout asks for it."""
    return Parallel(root, layout, settings)


def _mixed_precision(settings: Settings) -> MixedPrecisionPolicy:
    if settings.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)


class Parallel:
    """The parallel form of a root module: how to call it, and when its gradients are reduced."""

    def __init__(self, root: nn.Module, layout: Layout, settings: Settings):
        self._module = Replicas(root, layout) if layout.strategy == "ddp" else Shards(root, layout)
        self._layout = layout
        self._settings = settings

    def __call__(self, *args: Any) -> Any:
        with self._autocast():
            return self._module(*args)

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return self._layout.size("batch")

    def set_last_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch. Gradients are complete on every rank only after the last one."""
        self._module.set_last_micro_batch(last)

    def settle_gradients(self) -> None:
        """Call on every rank after the last backward of a step: what no rank's loss depends on then has no gradient."""
        self._module.settle_gradients()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._layout.strategy == "ddp" and self._settings.compute_dtype != torch.float32:
            return torch.autocast(self._layout.device_type, dtype=self._settings.compute_dtype)
        return nullcontext()
