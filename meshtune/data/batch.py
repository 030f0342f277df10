"""The batch that a model is trained on: a typed mapping whose fields declare their token axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100


_BY_TOKEN = {"tensor": True, "token_axis": 1}
_NO_TOKEN_AXIS = {"tensor": True, "token_axis": None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Mapping[str, Tensor]):
    """One micro-batch. As a mapping it holds the tensor fields that are present.

    B rows of T tokens; a packed micro-batch is one row of N tokens, documents one after another.

    - input_ids [B, T] int64
    - position_ids [B, T] int64, from 0 in each row and, packed, in each document
    - shift_labels [B, T] int64, already shifted: the id of the token after position t if it is supervised and
      of the same document, else -100
    - attention_mask [B, T] bool, true on real tokens; absent without padding and when packed
    - document_lengths [D] int64, on the CPU always; packed only; sums to N
    - real [B, T] bool, true on real tokens; only of a packed row's part, in which they need not come first

    `tokens` and `supervised_tokens` count real tokens and targets, as plain numbers; a filler micro-batch
    counts none.
    """

    input_ids: Tensor = field(metadata=_BY_TOKEN)
    position_ids: Tensor = field(metadata=_BY_TOKEN)
    shift_labels: Tensor = field(metadata=_BY_TOKEN)
    attention_mask: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    document_lengths: Tensor | None = field(default=None, metadata=_NO_TOKEN_AXIS)
    real: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    tokens: int = 0
    supervised_tokens: int = 0

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensor_fields() or getattr(self, name) is None:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.tensor_fields() if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @classmethod
    def tensor_fields(cls) -> tuple[str, ...]:
        """Return the names of the tensor fields, present or not."""
        return tuple(item.name for item in fields(cls) if item.metadata.get("tensor"))

    @classmethod
    def token_axis(cls, name: str) -> int | None:
        """Return the axis of a tensor field that counts tokens, or None."""
        return next(item.metadata["token_axis"] for item in fields(cls) if item.name == name)

    @property
    def packed(self) -> bool:
        """Whether this is one row of documents that must not see each other."""
        return self.document_lengths is not None

    @property
    def real_tokens(self) -> Tensor:
        """[B, T] bool, true on real tokens: neither padding nor any token of a filler micro-batch."""
        if self.tokens == 0:
            return torch.zeros_like(self.input_ids, dtype=torch.bool)
        if (mask := self.attention_mask if self.real is None else self.real) is not None:
            return mask
        first = self.tokens if self.packed else self.input_ids.shape[1]
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (places < first).expand_as(self.input_ids)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device. Document lengths stay on the CPU: kernels are launched by them."""
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in self.items() if k != "document_lengths"}
        return replace(self, **moved)
