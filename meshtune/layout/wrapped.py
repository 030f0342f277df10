"""Tensors of a class that a library lays around others, to tell FSDP2 how they are gathered (weights in float8).

Such a class copies and saves as others do not. What reads and writes values asks for the tensor inside, which shares its memory;
what puts a new tensor in its place lays the class around it again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["is_wrapped", "unwrapped", "wrapped_like"]


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a library's class says how `tensor`, or this rank's part of it, is gathered."""
    return hasattr(_local(tensor), "fsdp_pre_all_gather")


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside, in the same memory; any other as it is."""
    if not is_wrapped(tensor):
        return tensor
    local: Any = _local(tensor)
    inner: Tensor = getattr(local, local.__tensor_flatten__()[0][0])
    return _in_place_of(inner, tensor)


def wrapped_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with what is laid around `like` laid around it; as it is if that is nothing, or it is there already."""
    if not is_wrapped(like) or is_wrapped(tensor):
        return tensor
    local, around = _local(tensor), _local(like)
    names, context = around.__tensor_flatten__()  # type: ignore[attr-defined]
    whole: Tensor = type(around).__tensor_unflatten__({names[0]: local}, context, local.shape, local.stride())  # type: ignore[attr-defined]
    return _in_place_of(whole, tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_place_of(local: Tensor, whole: Tensor) -> Tensor:
    """`local` as this rank's part of what `whole` is."""
    if not isinstance(whole, DTensor):
        return local
    mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, whole.placements, run_check=False, shape=shape, stride=stride)
