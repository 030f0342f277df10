"""Several tensors that are rows of one, as torch.distributed.checkpoint writes and reads them; see `part` for its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Rows(Tensor):
    """A tensor of which this rank has `tensors`: blocks of rows, by the first row of each. Nothing can be computed with it."""

    tensors: dict[int, Tensor]

    @staticmethod
    def __new__(cls, whole: tuple[int, ...], tensors: Mapping[int, Tensor]) -> Rows:
        like = next(iter(tensors.values()))
        rows: Rows = Tensor._make_wrapper_subclass(cls, torch.Size(whole), dtype=like.dtype, device=like.device)
        rows.tensors = dict(tensors)
        return rows

    def __init__(self, whole: tuple[int, ...], tensors: Mapping[int, Tensor]):
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{operation} of rows of a tensor: they are only written to a checkpoint and read from it")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(tensor), size=self.shape
                ),
            )
            for chunk, tensor in zip(self.__create_chunk_list__(), self.tensors.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((start, *(0,) * (tensor.ndim - 1))), tensor.shape)
            for start, tensor in self.tensors.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.tensors[index.offset[0]]
