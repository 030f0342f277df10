"""Parameters that several pipeline ranks hold: one value, and one gradient, the sum of theirs.

Each holder sends its own to the others and adds all up in the order of ranks, so that the sums are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.layout import Layout
from meshtune.parallel.stages import Shared

__all__ = ["copy_shared", "sum_shared"]


@torch.no_grad()
def sum_shared(model: nn.Module, shared: Sequence[Shared], layout: Layout) -> None:
    """Make each holder's gradient the sum over holders. What no holder has a gradient of stays without one."""
    for ranks, parameters in _groups(model, shared, trainable=True):
        own = torch.cat([_flat(p.grad, p) for p in parameters])
        flags = torch.tensor([p.grad is not None for p in parameters], dtype=own.dtype, device=own.device)
        parts = _exchange(torch.cat([flags, own]), ranks, layout)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        sizes = [len(parameters), *(_local(p).numel() for p in parameters)]
        counts, *sums = total.split(sizes)
        for parameter, count, gradient in zip(parameters, counts.tolist(), sums, strict=True):
            if count:
                _set_gradient(parameter, gradient)


@torch.no_grad()
def copy_shared(model: nn.Module, shared: Sequence[Shared], layout: Layout) -> None:
    """Give each holder the value that the first of them has."""
    for ranks, parameters in _groups(model, shared):
        values = torch.cat([_local(p).reshape(-1) for p in parameters])
        first = _exchange(values, ranks, layout)[0]
        for parameter, value in zip(parameters, first.split([_local(p).numel() for p in parameters]), strict=True):
            _local(parameter).copy_(value.view_as(_local(parameter)))


def _groups(
    model: nn.Module, shared: Sequence[Shared], trainable: bool = False
) -> list[tuple[tuple[int, ...], list[nn.Parameter]]]:
    """Parameters by their holders and dtype, in one order on every rank."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for item in shared:
        parameter = model.get_parameter(item.name)
        if parameter.requires_grad or not trainable:
            groups.setdefault((item.ranks, parameter.dtype), []).append(parameter)
    return [(ranks, groups[ranks, dtype]) for ranks, dtype in sorted(groups, key=lambda key: (key[0], str(key[1])))]


def _exchange(own: Tensor, ranks: tuple[int, ...], layout: Layout) -> list[Tensor]:
    """The tensors of all `ranks` of this pipeline, in order."""
    rank, group = layout.rank("pp"), layout.group("pp")
    parts = [own if other == rank else torch.empty_like(own) for other in ranks]
    operations = []
    for other, part in zip(ranks, parts, strict=True):
        if other != rank:
            operations.append(dist.P2POp(dist.isend, own, group=group, group_peer=other))
            operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=other))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return parts


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    local = _local(parameter)
    return torch.zeros_like(local).reshape(-1) if gradient is None else _local(gradient).reshape(-1).to(local.dtype)


def _set_gradient(parameter: nn.Parameter, flat: Tensor) -> None:
    local = flat.view_as(_local(parameter)).clone()
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        local = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    parameter.grad = local
