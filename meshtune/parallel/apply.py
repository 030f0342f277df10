"""Apply a plan to a model on a layout. This file holds THE order:

    pipeline cut, float8, tensor and sequence parallelism, expert parallelism, context-parallel attention,
    activation checkpointing, compile, data parallelism

`shard` works on the meta device, before any weight exists; adapters are in the model already, and in the plan. DDP needs real
storage, so `replicate` is called after the weights are loaded. Context-parallel attention is in the model's attention
already: in training each rank's part of a batch is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshtune.layout import Layout, Plan
from meshtune.layout.pieces import set_aliases
from meshtune.layout.span import Absent
from meshtune.parallel import stages
from meshtune.parallel.activation_checkpointing import KINDS, Kind, Mode, Reopening, checkpoint_activations, offloaded
from meshtune.parallel.balance import Balance
from meshtune.parallel.compile import compile_units
from meshtune.parallel.experts import shard_experts, share_out
from meshtune.parallel.float8 import Float8, gather_in_float8, swap
from meshtune.parallel.stages import Stages
from meshtune.parallel.tensor import parallelize, shared_parameters


@dataclass(frozen=True)
class Settings:
    """What a recipe asks for beyond the mesh."""

    compute_dtype: torch.dtype = torch.float32
    activation_checkpointing: Mode = "none"
    compile: bool = False
    reopening: Reopening | None = None
    pp_schedule: str = "1f1b"
    pp_microbatches: int | None = None
    active_share: float = 1.0
    """Of stacked experts' parameters, what one token meets: stages are cut by cost."""
    checkpoint_every: int = 1
    checkpoint_keep: tuple[Kind, ...] = KINDS
    activation_offload: bool = False
    offload_parameters: bool = False
    """Shards, their gradients and so the optimizer's step are in the memory of the CPU."""
    float8: Float8 | None = None
    """Which layers multiply in float8, and how."""


@dataclass(frozen=True)
class Sharded:
    """What `shard` has made of a model on this rank.

    Attributes:
        plan: the rules of what this rank holds.
        shared: names of parameters that every tp rank holds whole, with a part of the gradient on each.
        stages: this rank's part of a pipeline, if there is one.
        balance: the load-balancing loss of its routers, if the model asks for one.
    """

    plan: Plan
    shared: tuple[str, ...] = ()
    stages: Stages | None = None
    balance: Balance | None = None


def shard(root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings) -> Sharded:
    """Everything that can be done before weights are loaded, in place.

    `root` is the module whose forward runs training, called as `root(objective, batch)`; it contains `model`, the transformers
    model. It becomes the root of data parallelism, so that whatever its forward does with parameters is inside.
    """
    cut = _cut_stages(root, model, layout, plan, settings)
    if cut is not None:
        plan = plan.on_stage(cut.blocks, [name for name, module in model.named_modules() if isinstance(module, Absent)])
    if settings.float8 is not None:
        swap(model, settings.float8)
    if layout.size("tp") > 1:
        parallelize(model, plan, layout, [stage.blocks for stage in cut.local] if cut else ())
    if layout.ep > 1:
        for found in plan.experts:
            share_out(model, found, layout)
    if (told := getattr(root, "set_layout", None)) is not None:
        told(layout)
    shared = tuple(shared_parameters(model, plan, layout))
    balance = None if plan.balancing is None else Balance(root, model, plan.balancing, layout, shared)
    units = [model.get_submodule(name) for name in plan.units]
    reopening = _reopening(settings, balance)
    mode, every, keep = settings.activation_checkpointing, settings.checkpoint_every, settings.checkpoint_keep
    checkpoint_activations(model, mode, reopening, every, keep)
    if settings.activation_offload:
        setattr(root, "around_trunk", partial(offloaded, layout.device_type))  # noqa: B010  an attribute of CausalLM
    if settings.compile:
        compile_units(units, layout.device_type)
    wanted = _converts(model, settings) or settings.offload_parameters or not _nothing_to_share(layout)
    if layout.strategy == "fsdp2" and wanted:
        _shard_data_parallel(root, model, units, layout, plan, settings)
    return Sharded(plan, shared, cut, balance)


def _cut_stages(root: nn.Module, model: nn.Module, layout: Layout, plan: Plan, settings: Settings) -> Stages | None:
    if layout.size("pp") == 1:
        return None
    mixed = layout.strategy == "fsdp2" and _converts(model, settings)
    cut = stages.cut(
        root,
        model,
        plan.units,
        layout,
        settings.pp_schedule,
        embedding_dtype=settings.compute_dtype if mixed else None,
        active_share=settings.active_share,
        joined=plan.joined_units,
        wrapped=plan.wrapped,
    )
    tied = {name: first for name, first in cut.placement.canonical.items() if name != first}
    set_aliases(model, {name: first for name, first in tied.items() if not cut.holds(first)})
    return cut


def _reopening(settings: Settings, balance: Balance | None) -> Reopening | None:
    """A block that runs again in the backward finds open what was open the first time."""
    if balance is None:
        return settings.reopening
    own, other = balance.reopening, settings.reopening

    def both() -> Callable[[], AbstractContextManager[None]]:
        return own(None if other is None else other())

    return both


def _nothing_to_share(layout: Layout) -> bool:
    """One rank has all that data parallelism would share out."""
    return layout.size("dp_replicate") * layout.size("fsdp") == 1 and layout.ep == 1


def _converts(model: nn.Module, settings: Settings) -> bool:
    """Whether weights are held in another dtype than they are used in (frozen ones in their checkpoint's), or in a narrow one,
    whose gradients are reduced in float32. FSDP2 does that; where nothing is shared out either, it would only copy."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes | {settings.compute_dtype} != {torch.float32}


def _apart(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Those of the modules at `paths` whose parameters are theirs alone. Each a group of its own, they are never gathered."""
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    modules = [model.get_submodule(path) for path in paths]
    return [module for module in modules if all(holders[id(p)] == 1 for p in module.parameters())]


def _shard_data_parallel(
    root: nn.Module, model: nn.Module, units: list[nn.Module], layout: Layout, plan: Plan, settings: Settings
) -> None:
    policy = MixedPrecisionPolicy()
    if _converts(model, settings):
        policy = MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if settings.offload_parameters:
        offload = CPUOffloadPolicy(pin_memory=layout.device_type != "cpu")
    if layout.ep > 1:
        for found in plan.experts:
            shard_experts(model.get_submodule(found.outermost), layout, policy, offload)
    if settings.float8 is not None and settings.float8.all_gather:
        gather_in_float8(model, settings.float8, layout.size("fsdp"))
    for module in (*_apart(model, plan.idle), *units, root):
        fully_shard(module, mesh=layout.data_parallel_mesh, mp_policy=policy, offload_policy=offload)
    for module in root.modules():
        if isinstance(
            module, FSDPModule
        ):  # gradients of dense parameters and of experts meet different numbers of ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
