"""Between which blocks a model can be cut into pipeline stages, where blocks read more of earlier ones than hidden states.

Layers that share keys or indices with later ones must be on one stage with them. Which these are is tried on a model that has
all the layers, one border after another: what is computed from the hidden states at the border alone must be what the whole
model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.data.batch import Batch
from meshtune.layout.span import Span
from meshtune.parallel.stand_ins import AbsentBlock
from meshtune.parallel.trunk import hidden_states

__all__ = ["joined_blocks"]

_TOLERANCE = 1e-4


@torch.no_grad()
def joined_blocks(root: nn.Module, model: nn.Module, blocks: Sequence[str], batch: Batch) -> frozenset[str]:
    """Those of `blocks`, in the order in which they run, that must be on one stage with the block before them."""
    inputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(_keeping(inputs, name), with_kwargs=True) for name in blocks
    ]
    whole = root(hidden_states, batch)
    for handle in handles:
        handle.remove()
    absent: dict[str, nn.Module] = {}
    found = set()
    for before, name in pairwise(blocks):
        absent[before] = AbsentBlock(model.get_submodule(before))
        try:
            apart = root(hidden_states, batch, Span(enter=name, replaced=dict(absent)), inputs[name])
        except Exception:  # whatever an architecture's code raises when a layer has not left what another reads
            found.add(name)
            continue
        if not torch.allclose(apart, whole, rtol=_TOLERANCE, atol=_TOLERANCE * float(whole.abs().max())):
            found.add(name)
    return frozenset(found)


def _keeping(inputs: dict[str, Tensor], name: str) -> Any:
    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[name] = (args[0] if args else kwargs["hidden_states"]).clone()

    return keep
