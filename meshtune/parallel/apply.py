"""Apply a plan to a model on a layout. This file holds THE order:

    pipeline cut, adapters, tensor and sequence parallelism, expert parallelism, context-parallel attention,
    activation checkpointing, compile, data parallelism

of which this version has the last three; each of the others takes its place in `shard` as one call. `shard` works on the
meta device, before any weight exists. DDP needs real storage, so `replicate` is called after the weights are loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshtune.layout import Layout, Plan
from meshtune.parallel.activation_checkpointing import Mode, checkpoint_activations
from meshtune.parallel.compile import compile_units
from meshtune.parallel.reach import reaches_all

# Renamed in torch 2.13. Buffers are computed from the config alone and are the same on every rank.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


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


def _replicas(root: nn.Module, layout: Layout, args: tuple[Any, ...]) -> DistributedDataParallel:
    """DDP, told to look for parameters without a gradient if a forward on `args` leaves some (of any rank) out.

    Routers have such parameters. Where there is none, looking for them at each step is a waste, of which torch warns.
    """
    devices = [] if layout.device_type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=layout.device_type):
        unreached = not reaches_all(root(*args), root.parameters())
    anywhere = torch.tensor(int(unreached), device=next(root.parameters()).device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=layout.group("batch"))
    return DistributedDataParallel(
        root,
        process_group=layout.group("batch"),
        init_sync=False,
        find_unused_parameters=bool(anywhere),
        **{_SYNC_BUFFERS: False},
    )


def _mixed_precision(settings: Settings) -> MixedPrecisionPolicy:
    if settings.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)


class Parallel:
    """The parallel form of a root module: how to call it, and when its gradients are reduced."""

    def __init__(self, root: nn.Module, layout: Layout, settings: Settings):
        self._module = root
        self._layout = layout
        self._settings = settings
        self._last_micro_batch = True

    def __call__(self, *args: Any) -> Any:
        with self._autocast():
            if self._layout.strategy == "ddp" and torch.is_grad_enabled():
                self._prepare_replicas(args)
            return self._module(*args)

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return self._layout.size("batch")

    def set_last_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch. Gradients are complete on every rank only after the last one.

        FSDP2 reduces shards at each micro-batch, so that no full gradient is ever kept, and the copies of HSDP, like
        those of DDP, once.
        """
        self._last_micro_batch = last
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_all_reduce(last)
            self._module.set_is_last_backward(last)

    def _prepare_replicas(self, args: tuple[Any, ...]) -> None:
        if not isinstance(self._module, DistributedDataParallel):
            self._module = _replicas(self._module, self._layout, args)
        self._module.require_backward_grad_sync = self._last_micro_batch

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._layout.strategy == "ddp" and self._settings.compute_dtype != torch.float32:
            return torch.autocast(self._layout.device_type, dtype=self._settings.compute_dtype)
        return nullcontext()
