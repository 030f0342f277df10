"""How a model runs its blocks, found by running it once without data: their order, and which parameters feed what.

Everything between embedding and first block, and between last block and head, is code of the architecture. What it does is
asked of autograd, on the meta device with every block standing in for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune.data.batch import Batch
from meshtune.layout.span import Span
from meshtune.parallel.reach import reached
from meshtune.parallel.stand_ins import AbsentBlock

__all__ = ["Trunk", "trace"]

_ROWS, _TOKENS = 1, 8


@dataclass
class Trunk:
    """`order` of the blocks as they are called; ids of the parameters that reach the hidden states of the first one (`entry`),
    or another argument of any block (`side`). Not `known` where the model's code cannot run without data."""

    order: tuple[str, ...] = ()
    entry: set[int] = field(default_factory=set)
    side: set[int] = field(default_factory=set)
    known: bool = True


class _Recorder(AbsentBlock):
    def __init__(self, original: nn.Module, name: str, trunk: Trunk):
        super().__init__(original)
        self.__dict__.update(_name=name, _trunk=trunk)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        trunk: Trunk = self.__dict__["_trunk"]
        if not trunk.order:
            trunk.entry |= reached(args[0] if args else kwargs["hidden_states"])
        trunk.order = (*trunk.order, self.__dict__["_name"])
        trunk.side |= reached((args[1:], {k: v for k, v in kwargs.items() if args or k != "hidden_states"}))
        return super().forward(*args, **kwargs)


class _AnyValue(TorchDispatchMode):
    """Code that decides by a value of a tensor (are these rows packed? is any of this masked?) goes on where there is none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        return function(*args, **(kwargs or {}))


def trace(root: nn.Module, model: nn.Module, blocks: Sequence[str]) -> Trunk:
    """What `root` does around and between `blocks`."""
    trunk = Trunk()
    recorders = {name: _Recorder(model.get_submodule(name), name, trunk) for name in blocks}
    device = next(model.parameters()).device
    ids = torch.zeros((_ROWS, _TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(_TOKENS, device=device).expand(_ROWS, -1)
    batch = Batch(input_ids=ids, position_ids=positions, shift_labels=ids)
    try:
        with _AnyValue():
            root(hidden_states, batch, Span(replaced=recorders))
    except Exception:  # whatever an architecture's code raises when its tensors have no values
        if set(trunk.order) != set(blocks):  # behind the last block there is nothing left to learn
            return Trunk(tuple(blocks), known=False)
    return trunk


def hidden_states(model: Any, batch: Batch) -> Any:
    """The least of all objectives."""
    return model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask)
