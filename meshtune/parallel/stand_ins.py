"""What stands in the module tree of a pipeline stage where other stages have something: no parameters, the same attributes.

Names, layer indices and loops over layers stay those of the whole model. Before a stage's first block stand-ins hand on values
that nothing reads, for the first block is given its input; after the last block nothing runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshtune.layout.span import Absent

__all__ = ["AbsentBlock", "AbsentEmbedding", "AbsentModule", "is_absent"]


class AbsentModule(nn.Module, Absent):
    """A module that this stage does not run. Answers for the attributes of the original."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(self.__dict__['_original']).__name__} was called on a pipeline stage that is without it"
        )


class AbsentBlock(AbsentModule):
    """Hands hidden states on."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return (args[0] if args else kwargs["hidden_states"]).as_subclass(_TensorOrTuple)


class AbsentEmbedding(AbsentModule):
    """Zeros of the shape and dtype that the embedding would give."""

    def __init__(self, original: nn.Module, dtype: torch.dtype | None = None):
        super().__init__(original)
        weight = next(original.parameters())
        self.width: int = getattr(original, "embedding_dim", weight.shape[-1])
        self.dtype = dtype or weight.dtype
        self.device = weight.device

    @property
    def weight(self) -> Tensor:
        """Some models ask it for its dtype, and move their input to its device."""
        return torch.empty((0, self.width), dtype=self.dtype, device=self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.zeros((*ids.shape, self.width), dtype=self.dtype, device=ids.device)


class _TensorOrTuple(torch.Tensor):
    """Hidden states, for a loop that takes a block's output as such as well as for one that takes the output's first element,
    or unpacks a pair.

    What operators make of it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self if index == 0 else None
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        return iter((self, None))


def is_absent(module: nn.Module) -> bool:
    """Whether a module of the tree is on other pipeline stages only."""
    return isinstance(module, Absent)
