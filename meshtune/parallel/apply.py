"""Apply a plan to a model on a layout. This file holds THE order:

    pipeline cut, adapters, tensor and sequence parallelism, expert parallelism, context-parallel attention,
    activation checkpointing, compile, data parallelism

`shard` works on the meta device, before any weight exists. DDP needs real storage, so `replicate` is called after the weights
are loaded. Context-parallel attention is in the model's attention already: here each rank's part of a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshtune.data.batch import Batch
from meshtune.layout import Layout, Plan
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import Cut, named_pieces
from meshtune.parallel.activation_checkpointing import Mode, Reopening, checkpoint_activations
from meshtune.parallel.balance import Balance, route_only
from meshtune.parallel.compile import compile_units
from meshtune.parallel.context import cut
from meshtune.parallel.experts import dispatch, shard_experts
from meshtune.parallel.replicas import Replicas
from meshtune.parallel.shards import Shards
from meshtune.parallel.shared import SharedGradients
from meshtune.parallel.tensor import cut_parameters, parallelize, shared_parameters

Objective = Callable[[Any, Batch], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""From root module and batch to (loss_sum, count, metrics), all over this batch only; what a recipe hands to `fit`."""


@dataclass(frozen=True)
class Settings:
    """What a recipe asks for beyond the mesh."""

    compute_dtype: torch.dtype = torch.float32
    activation_checkpointing: Mode = "none"
    compile: bool = False
    reopening: Reopening | None = None


def shard(root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings) -> None:
    """Everything that can be done before weights are loaded, in place.

    `root` is the module whose forward runs training (it contains `model`, the transformers model); it becomes the root of
    data parallelism, so that whatever its forward does with parameters is inside.
    """
    if layout.size("tp") > 1:
        parallelize(model, plan, layout)
    if (told := getattr(root, "set_layout", None)) is not None:
        told(layout)
    experts = [] if layout.ep == 1 else list(plan.experts)
    for found in experts:
        cuts = {f"{found.path}.{name}": Cut("ep", 0, (found.count,)) for name in found.parameters}
        cut_parameters(model, cuts, layout)
        dispatch(model.get_submodule(found.path), found, layout)
    units = [model.get_submodule(name) for name in plan.units]
    checkpoint_activations(model, settings.activation_checkpointing, settings.reopening)
    if settings.compile:
        compile_units(units, layout.device_type)
    if layout.strategy == "fsdp2":
        for found in experts:
            shard_experts(model.get_submodule(found.path), layout, settings.compute_dtype)
        for module in (*units, root):
            fully_shard(module, mesh=layout.data_parallel_mesh, mp_policy=_mixed_precision(settings))
        _sum_gradients(root)


def _mixed_precision(settings: Settings) -> MixedPrecisionPolicy:
    if settings.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)


def _sum_gradients(root: nn.Module) -> None:
    """Reductions add up and divide by nothing: gradients of dense parameters and of experts meet different numbers of ranks."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def replicate(root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings) -> Parallel:
    """After the weights are loaded: what runs the model in training and validation."""
    return Parallel(root, model, layout, plan, settings)


class Parallel:
    """The parallel form of a root module: forwards and backwards of micro-batches, with complete gradients after the last."""

    def __init__(self, root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings):
        self._module = Replicas(root, layout) if layout.strategy == "ddp" else Shards(root, layout)
        self._layout, self._settings = layout, settings
        names = shared_parameters(model, plan, layout)
        self._shared = SharedGradients(
            [model.get_parameter(name) for name in names], layout.peers("tp") if names else None
        )
        self._multiple = layout.size("tp") if layout.sequence_parallel else 1
        self.parts: dict[nn.Parameter, Peers] = {
            model.get_parameter(name): layout.peers(piece.axis) for name, piece in named_pieces(model).items()
        }
        """Parameters that are parts of a whole, and the ranks that hold the others."""
        self._balance = None if plan.balancing is None else Balance(root, model, plan.balancing, layout, names)
        self.metrics: dict[str, Tensor] = {}
        """What the last optimizer step says of itself beside its loss: names to 0-d tensors, the same on every rank."""

    def train(self, objective: Objective, batches: Sequence[Batch], scale: float) -> Tensor:
        """Forward and backward of this rank's micro-batches of one global batch, whose loss sums count `scale` times.

        Returns the sum of their losses, 0-d, as far as this rank has computed it; every gradient is then complete.
        """
        scale *= self._module.gradient_divisor
        losses: list[Tensor] = []
        if self._balance is not None:
            self._count_routes(self._balance, batches)
        for index, batch in enumerate(batches):
            self._module.set_last_micro_batch(index == len(batches) - 1)
            loss_sum, _, _ = self._run(objective, batch)
            (loss_sum * scale).backward()
            losses.append(loss_sum.detach().to(_widest(loss_sum)))
        self._module.settle_gradients()
        self._shared.add_up()
        return torch.stack(losses).sum()

    def _count_routes(self, balance: Balance, batches: Sequence[Batch]) -> None:
        """Which experts the global batch goes to, found by a forward of its own, with the random numbers of the training one."""
        with torch.no_grad(), torch.random.fork_rng(), balance.counting():
            for batch in batches:
                self._run(route_only, batch)
        self.metrics["router_aux_loss"] = balance.settle(self._module.gradient_divisor)

    @torch.no_grad()
    def evaluate(self, objective: Objective, batch: Batch) -> Tensor:
        """The loss sum of one micro-batch, as far as this rank has computed it."""
        loss_sum = self._run(objective, batch)[0]
        return loss_sum.to(_widest(loss_sum))

    def _run(self, objective: Objective, batch: Batch) -> Any:
        if self._layout.size("cp") * self._multiple > 1:
            batch = cut(batch, self._layout.peers("cp"), self._multiple)
        with self._autocast():
            return self._module(objective, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._layout.strategy == "ddp" and self._settings.compute_dtype != torch.float32:
            return torch.autocast(self._layout.device_type, dtype=self._settings.compute_dtype)
        return nullcontext()


def _widest(tensor: Tensor) -> torch.dtype:
    """A sum of losses is kept in float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
