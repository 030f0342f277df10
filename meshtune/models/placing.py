"""A rank's part of a tensor, cut by the tensor's own placements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshtune.layout.pieces import Piece, Rectangle, aliases, named_pieces, piece_of, whole_shape
from meshtune.layout.wrapped import unwrapped, wrapped_like
from meshtune.optim.rounding import Position


def own_slice(whole: Tensor, like: Tensor, piece: Piece | None = None) -> Tensor:
    """What this rank holds of `whole` if it is laid out as `like` is, which may itself be a piece of it."""
    if piece is not None:
        whole = piece.of(whole)
    if not isinstance(like, DTensor):
        return whole
    offset, shape = own_box(like)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole.contiguous()


def own_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def own_rectangles(tensor: Tensor, piece: Piece | None) -> list[Rectangle]:
    """Where what this rank holds lies in the whole tensor."""
    offset, shape = own_box(local_of(tensor) if piece is not None and piece.axis == "fsdp" else tensor)
    if piece is not None:
        return list(piece.rectangles(offset, shape))
    return [Rectangle(offset, (0,) * len(shape), shape)] if math.prod(shape) else []


def positions(model: nn.Module) -> dict[nn.Parameter, Position]:
    """Of each parameter of a sharded model, what this rank has of it. A tied one goes by its name in checkpoints."""
    pieces, names = named_pieces(model), aliases(model)
    return {
        parameter: Position(
            names.get(name, name),
            whole_shape(parameter.shape, pieces.get(name)),
            own_rectangles(parameter, pieces.get(name)),
        )
        for name, parameter in model.named_parameters()
    }


def local_of(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds."""
    tensor = unwrapped(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_like(local: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter that holds `local` where `like` holds (or on meta stands for) its part."""
    if isinstance(like, DTensor) and local.device.type != like.device_mesh.device_type:
        held = torch.empty_like(
            like, dtype=local.dtype, device=local.device, requires_grad=False
        )  # from_local would move it
        local_of(held).copy_(local)
        local = held
    elif isinstance(like, DTensor):
        local = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    parameter = nn.Parameter(wrapped_like(local, like), like.requires_grad)
    setattr(parameter, "_is_hf_initialized", True)  # noqa: B010  transformers' rules of initialisation leave it alone now
    return parameter


def set_whole(owner: nn.Module, name: str, whole: Tensor, device: torch.device) -> None:
    """Give a module's own parameter, of which this rank holds a part, its values out of the whole tensor."""
    parameter = owner._parameters[name]
    assert parameter is not None
    own = own_slice(whole, parameter, piece_of(owner, name)).to(device, parameter.dtype, copy=True)
    if parameter.is_meta:
        owner._parameters[name] = parameter_like(own, parameter)
    else:
        local_of(parameter.data).copy_(own)


def without_value(like: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a tensor in which it shows if nothing is written to it."""
    local = like.to_local() if isinstance(like, DTensor) else like
    if like.is_floating_point() or like.is_complex():
        return torch.full(local.shape, torch.nan, dtype=like.dtype, device=device)
    lowest = False if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full(local.shape, lowest, dtype=like.dtype, device=device)


def has_value(tensor: Tensor) -> bool:
    """Whether everything in a tensor made by `without_value` was written to."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(torch.isnan(tensor).any())
    return tensor.dtype in (torch.bool, torch.uint8) or not bool((tensor == torch.iinfo(tensor.dtype).min).any())
