"""A rank's part of a tensor that a model's own axes cut, as torch.distributed.checkpoint writes and reads it.

torch asks an object for its chunks (`torch.distributed._checkpointable`), which is how DTensor answers too. tests/dist pin it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshtune.layout.pieces import Piece, Rectangle


class Part(Tensor):
    """A tensor of the whole's shape that has only the values of `tensor`, a piece of it, maybe sharded by data parallelism.

    Nothing can be computed with it.
    """

    tensor: Tensor
    piece: Piece

    @staticmethod
    def __new__(cls, tensor: Tensor, piece: Piece) -> Part:
        part: Part = Tensor._make_wrapper_subclass(
            cls, torch.Size(piece.shape), dtype=tensor.dtype, device=tensor.device
        )
        part.tensor, part.piece = tensor, piece
        return part

    def __init__(self, tensor: Tensor, piece: Piece):
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{operation} of a part of a tensor: it is only written to a checkpoint and read from it")

    def _rectangles(self) -> Iterator[Rectangle]:
        offset, shape = (0,) * self.tensor.ndim, tuple(self.tensor.shape)
        if isinstance(self.tensor, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                self.tensor.shape, self.tensor.device_mesh, self.tensor.placements
            )
        return self.piece.rectangles(tuple(offset), tuple(shape))

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(rectangle.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(rectangle),
                    properties=TensorProperties.create_from_tensor(self._local),
                    size=self.shape,
                ),
            )
            for rectangle in self._rectangles()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(rectangle) for rectangle in self._rectangles()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        found = next(r for r in self._rectangles() if torch.Size(r.start) == index.offset)
        return found.within(self._local)

    @property
    def _local(self) -> Tensor:
        return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor


def _chunk(rectangle: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(rectangle.start), torch.Size(rectangle.shape))
