"""The parallel form of a model in training and validation: micro-batches in, losses and complete gradients out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtune.data.batch import Batch
from meshtune.data.padding import alike
from meshtune.layout import Layout
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import named_pieces
from meshtune.optim.grad_norm import grad_norm
from meshtune.parallel.apply import Settings, Sharded
from meshtune.parallel.balance import Balance, route_only
from meshtune.parallel.context import cut
from meshtune.parallel.float8 import precomputed_scales
from meshtune.parallel.megatron import MegatronShards
from meshtune.parallel.pipeline import Pipeline
from meshtune.parallel.replicas import Replicas
from meshtune.parallel.shards import Shards
from meshtune.parallel.tensor_gradients import TensorGradients

Objective = Callable[[Any, Batch], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""From root module and batch to (loss_sum, count, metrics), all over this batch only; what a recipe hands to `fit`."""


def replicate(root: nn.Module, model: nn.Module, layout: Layout, sharded: Sharded, settings: Settings) -> Parallel:
    """After the weights are loaded: what runs the model that `shard` has made of `root` and `model`."""
    return Parallel(root, model, layout, sharded, settings)


class Parallel:
    """Forwards and backwards of micro-batches on any layout."""

    def __init__(self, root: nn.Module, model: nn.Module, layout: Layout, sharded: Sharded, settings: Settings):
        self._root, self._layout, self._settings, self._balance = root, layout, settings, sharded.balance
        self._gathers_in_float8 = settings.float8 is not None and settings.float8.all_gather
        self._prefix = next(f"{name}." for name, module in root.named_modules() if module is model)
        self._multiple = layout.size("tp") if layout.sequence_parallel else 1
        self._whole: _Whole | _Stages = (
            _Whole(_data_parallel(root, model, layout, sharded), self._autocast)
            if sharded.stages is None
            else _Stages(root, model, sharded, layout, settings, self._autocast)
        )
        shared = [model.get_parameter(name) for name in sharded.shared]
        self._shared = TensorGradients(shared, layout.peers("tp") if shared else None)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parts: dict[nn.Parameter, Peers] = {
            parameters[name]: layout.peers(piece.axis)
            for name, piece in named_pieces(model).items()
            if piece.axis != "fsdp" and name in parameters  # a shard, whose mesh says so; buffers have no gradient
        }
        self._counted_elsewhere = {
            p for name, p in model.named_parameters() if sharded.stages is not None and not sharded.stages.counts(name)
        }
        self.metrics: dict[str, Tensor] = {}
        """What the last optimizer step says of itself beside its loss: names to 0-d tensors, the same on every rank."""

    def train(
        self, objective: Objective, batches: Sequence[Batch], scale: float, loss_scale: float | None = None
    ) -> Tensor:
        """Forward and backward of this rank's micro-batches of one global batch, whose loss sums count `scale` times.

        With a `loss_scale` (float16) every gradient is that many times too large. Returns the sum of their losses, 0-d, as far
        as this rank has computed it, without any scale; every gradient is then complete.
        """
        batches = self._own(batches)
        divisor = self._whole.gradient_divisor
        if loss_scale is not None:
            scale *= loss_scale
            self._root.gradient_scale = scale * divisor  # type: ignore[assignment]
        if self._balance is not None:
            self._count_routes(self._balance, batches, divisor * (loss_scale or 1.0))
        with precomputed_scales(self._root) if self._gathers_in_float8 else nullcontext():
            loss_sum = self._whole.train(objective, batches, scale)
        self._shared.add_up()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, objective: Objective, batch: Batch) -> Tensor:
        """The loss sum of one micro-batch (or what `objective` gives in its place), as far as this rank has computed it."""
        (own,) = self._own([batch])
        return self._whole.evaluate(objective, own)

    def grad_norm(
        self, parameters: Iterable[nn.Parameter], freed: Mapping[nn.Parameter, Tensor] | None = None
    ) -> Tensor:
        """The L2 norm of the gradients of all parameters on all ranks, of which `parameters` are those of this one; of those that
        have been `freed`, the norm of this rank's part."""
        counted = [p for p in parameters if p not in self._counted_elsewhere]
        stages = self._layout.peers("pp") if self._layout.size("pp") > 1 else None
        # Of a stage that trains nothing, where the others count theirs: weights may be in the memory of the CPU.
        device = next((p.device for p in self._root.parameters()), torch.device(self._layout.device_type))
        return grad_norm(counted, self._parts, stages, device, freed)

    def settled_late(self) -> frozenset[str]:
        """Names of parameters of the model whose gradients are complete only when `train` is over."""
        return frozenset(name.removeprefix(self._prefix) for name in self._whole.settled_late())

    def _own(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """This rank's part of micro-batches, which a pipeline wants in one shape."""
        if self._layout.size("pp") > 1:
            batches = alike(batches)
        if self._layout.size("cp") * self._multiple > 1:
            batches = [cut(batch, self._layout.peers("cp"), self._multiple) for batch in batches]
        return batches

    def _count_routes(self, balance: Balance, batches: Sequence[Batch], gradient_scale: float) -> None:
        """Which experts the global batch goes to, found by a forward of its own, with the random numbers of the training one."""
        with torch.no_grad(), torch.random.fork_rng(), balance.counting():
            for batch in batches:
                self._whole.evaluate(route_only, batch)
        self.metrics["router_aux_loss"] = balance.settle(gradient_scale)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._layout.strategy != "fsdp2" and self._settings.compute_dtype != torch.float32:
            return torch.autocast(self._layout.device_type, dtype=self._settings.compute_dtype)
        return nullcontext()


def _data_parallel(
    root: nn.Module, model: nn.Module, layout: Layout, sharded: Sharded
) -> Replicas | Shards | MegatronShards:
    if layout.strategy == "megatron_fsdp":
        return MegatronShards(root, [model.get_submodule(name) for name in sharded.plan.units], layout)
    return Shards(root, layout) if isinstance(root, FSDPModule) else Replicas(root, layout)


class _Whole:
    """A model whose layers are all on every rank: micro-batches one after another."""

    def __init__(self, module: Replicas | Shards | MegatronShards, around: Callable[[], AbstractContextManager[Any]]):
        self._module, self._around = module, around

    @property
    def gradient_divisor(self) -> int:
        return self._module.gradient_divisor

    def settled_late(self) -> Sequence[str]:
        return self._module.settled_late()

    def train(self, objective: Objective, batches: Sequence[Batch], scale: float) -> Tensor:
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            self._module.set_last_micro_batch(index == len(batches) - 1)
            loss_sum = self._loss_sum(objective, batch)
            (loss_sum * (scale * self.gradient_divisor)).backward()
            losses.append(loss_sum.detach().to(_widest(loss_sum)))
        self._module.settle_gradients()
        return torch.stack(losses).sum()

    def evaluate(self, objective: Objective, batch: Batch) -> Tensor:
        loss_sum = self._loss_sum(objective, batch)
        return loss_sum.to(_widest(loss_sum))

    def _loss_sum(self, objective: Objective, batch: Batch) -> Tensor:
        with self._around():
            return self._module(objective, batch)[0]


class _Stages:
    """A model whose layers are cut into stages."""

    gradient_divisor = 1

    def settled_late(self) -> Sequence[str]:
        return ()

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        sharded: Sharded,
        layout: Layout,
        settings: Settings,
        around: Callable[[], AbstractContextManager[Any]],
    ):
        assert sharded.stages is not None
        self._pipeline = Pipeline(
            root, model, sharded.stages, layout, settings.pp_schedule, settings.pp_microbatches, around
        )
        self._pipeline.share_values()

    def train(self, objective: Objective, batches: Sequence[Batch], scale: float) -> Tensor:
        return self._pipeline.train(objective, batches, scale)

    def evaluate(self, objective: Objective, batch: Batch) -> Tensor:
        return self._pipeline.evaluate(objective, batch)


def _widest(tensor: Tensor) -> torch.dtype:
    """A sum of losses is kept in float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
