"""A copy of a state in host memory, which torch.distributed.checkpoint writes as it would write the state itself.

What to write of a tensor is asked of the tensor (whole, a shard of DTensor, a part of ours), so the files hold the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from meshtune.checkpoint.state import State


class Staged(Tensor):
    """The boxes of a tensor that this rank writes, copied. Nothing can be computed with it."""

    items: list[WriteItem]
    boxes: dict[MetadataIndex, Tensor]

    @staticmethod
    def __new__(cls, name: str, tensor: Tensor) -> Staged:
        staged: Staged = Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=torch.device("cpu")
        )
        elsewhere = isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None
        staged.items = [] if elsewhere else _create_write_items(name, tensor)
        staged.boxes = {item.index: _copied(find_tensor_shard(tensor, item.index)) for item in staged.items}
        return staged

    def __init__(self, name: str, tensor: Tensor):
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{operation} of a staged tensor: it is only written to a checkpoint")

    def __create_write_items__(self, _name: str, _object: object) -> list[WriteItem]:
        return self.items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index]


def stage(state: State) -> State:
    """`state` as it is now; what is done to its tensors from now on does not change it."""
    return {name: Staged(name, tensor) for name, tensor in state.items()}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
