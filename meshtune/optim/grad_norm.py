"""The global gradient norm over plain tensors and DTensors on any mixture of meshes, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtune.errors import TrainingError

__all__ = ["clip_grad_norm_", "grad_norm"]


class Peers(Protocol):
    """Ranks that hold different parameters or parts: see `meshtune.layout.peers`."""

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor: ...


ShardedOver = tuple[DeviceMesh | None, tuple[int, ...]]


def grad_norm(
    parameters: Iterable[nn.Parameter],
    parts: Mapping[nn.Parameter, Peers] | None = None,
    stages: Peers | None = None,
    device: torch.device | None = None,
    freed: Mapping[nn.Parameter, Tensor] | None = None,
) -> Tensor:
    """The L2 norm of all gradients together, the same on every rank.

    A sharded gradient counts with its local part, summed over exactly the mesh dimensions in which its
    parameter is sharded; what is replicated counts once. A plain tensor counts as it is, so it must already
    be the same on all ranks, as DDP leaves it. Every rank must give the same parameters in the same order: a
    parameter without a gradient counts 0, and its rank still takes part in the sum.

    Args:
        parameters: those of this rank that count; of a weight that several stages of a pipeline hold, one of them.
        parts: for parameters that are parts themselves, the ranks that hold the others.
        stages: ranks that hold other parameters.
        device: where this rank, which may have none of them, counts its 0.
        freed: of gradients that are there no more, the norms of this rank's parts, 0-d float32.

    Returns:
        0-d float32 on the parameters' device; inf or NaN in a gradient shows in it.

    Raises:
        TrainingError: there are no parameters and no device, or one, or its gradient, has placements whose norm is not a
            sum over shards (`Partial`), or the two differ.
    """
    groups: dict[ShardedOver, dict[Peers | None, list[nn.Parameter]]] = {}
    freed = freed or {}
    found: torch.device | None = None
    for parameter in parameters:
        found = found or parameter.device
        alike = groups.setdefault(_sharded_over(parameter), {}).setdefault((parts or {}).get(parameter), [])
        if parameter.grad is not None or parameter in freed:
            alike.append(parameter)
    device = found or device
    if device is None:
        raise TrainingError("the gradient norm needs at least one parameter")
    total = _sum_of_squares(groups, device, freed)
    return (total if stages is None else stages.all_reduce(total)).sqrt()


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float | None, norm: Tensor, loss_scale: float = 1.0
) -> None:
    """Scale every gradient in place by `min(1, max_norm / (norm + 1e-6))`, torch's own rule.

    Args:
        parameters: those that `norm` was taken over.
        max_norm: None leaves the gradients as they are; 0 makes them zero.
        norm: 0-d, from `grad_norm`; it must be finite (check it first: inf would turn the gradients into
            NaN).
        loss_scale: what gradients are too large by, and are divided by in any case; `norm` is that of what they are then.
    """
    if max_norm is None and loss_scale == 1.0:
        return
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = norm.new_ones(()) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, (factor / loss_scale).to(gradients[0].device))


def _sharded_over(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a parameter and those of its dimensions that hold parts; (None, ()) for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in parameter.placements):
        raise TrainingError(f"no gradient norm for a parameter with placements {parameter.placements}")
    dims = tuple(d for d, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh, dims


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    found = gradient.placements if isinstance(gradient, DTensor) else None
    if placements != found:
        raise TrainingError(
            f"a gradient has placements {found}, its parameter of shape {[*parameter.shape]} {placements}; "
            "reduce or redistribute it before the norm"
        )
    return _local(gradient)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(
    groups: Mapping[ShardedOver, Mapping[Peers | None, list[nn.Parameter]]],
    device: torch.device,
    freed: Mapping[nn.Parameter, Tensor],
) -> Tensor:
    """0-d float32: over shards, of all that is sharded alike in one reduction; then over parts, likewise."""
    over_shards: dict[Peers | None, list[Tensor]] = {}
    for (mesh, dims), by_peers in groups.items():
        squares = torch.stack([_own_squares(parameters, device, freed) for parameters in by_peers.values()])
        for dim in dims:
            if mesh is not None and mesh.size(dim) > 1:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        for peers, square in zip(by_peers, squares, strict=True):
            over_shards.setdefault(peers, []).append(square)
    sums = [(peers, torch.stack(squares).sum()) for peers, squares in over_shards.items()]
    reduced = [own if peers is None else peers.all_reduce(own) for peers, own in sums]
    return torch.stack(reduced or [torch.zeros((), dtype=torch.float32, device=device)]).sum()


def _own_squares(parameters: list[nn.Parameter], device: torch.device, freed: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """0-d float32: over this rank's parts."""
    if not parameters:
        return torch.zeros((), dtype=torch.float32, device=device)
    there = [p for p in parameters if p not in freed]
    found = torch._foreach_norm([_local_gradient(p) for p in there], 2, dtype=torch.float32) if there else ()
    norms = {**freed, **dict(zip(there, found, strict=True))}
    return torch.stack([norms[p] for p in parameters]).square().sum()
