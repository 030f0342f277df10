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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshtune.layout import Layout, Plan
from meshtune.parallel.activation_checkpointing import Mode, checkpoint_activations
from meshtune.parallel.compile import compile_units


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
    """After the weights are loaded: wrap for DDP where the layout asks for it, and hand out the module to call."""
    if layout.strategy == "ddp":
        root = DistributedDataParallel(root, process_group=layout.group("batch"), init_sync=False, broadcast_buffers=False)
    return Parallel(root, layout, settings)


def _mixed_precision(settings: Settings) -> MixedPrecisionPolicy:
    if settings.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)


class Parallel:
    """The parallel form of a root module: how to call it, and when its gradients are reduced."""

    def __init__(self, module: nn.Module, layout: Layout, settings: Settings):
        self.module = module
        self._layout = layout
        self._settings = settings

    def __call__(self, *args: Any) -> Any:
        with self._autocast():
            return self.module(*args)

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return self._layout.size("batch")

    def set_last_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch. Gradients are complete on every rank only after the last one.

        FSDP2 reduces shards at each micro-batch, so that no full gradient is ever kept, and the copies of HSDP, like
        those of DDP, once.
        """
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        elif isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
            self.module.set_is_last_backward(last)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._layout.strategy == "ddp" and self._settings.compute_dtype != torch.float32:
            return torch.autocast(self._layout.device_type, dtype=self._settings.compute_dtype)
        return nullcontext()
