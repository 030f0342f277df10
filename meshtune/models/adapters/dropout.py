"""Dropout of an adapter's input where ranks hold different parts of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SPREAD = 0x9E3779B97F4A7C15  # far apart for neighbouring ranks


def drop(x: Tensor, dropout: nn.Module, stream: int | None) -> Tensor:
    """`x` with elements taken away at random while training; `x` itself, and no random number drawn, where none can be.

    Ranks of tp draw the same numbers, so that what they all hold loses the same elements. Where each holds something of its
    own, `stream` says which one this is, and each draws a mask of its own.
    """
    if not isinstance(dropout, nn.Dropout) or not dropout.training or dropout.p == 0.0:
        return x
    return dropout(x) if stream is None else x * _mask(x, dropout.p, stream)


@torch.compiler.disable
def _mask(x: Tensor, probability: float, stream: int) -> Tensor:
    """One number from the common generator, on every rank, so that they stay alike and a block that runs again in the backward
    finds the same mask; a generator of its own for the rest."""
    common = int(torch.randint(2**62, ()))
    generator = torch.Generator(x.device).manual_seed((common + stream * _SPREAD) % 2**63)
    kept = torch.empty_like(x, requires_grad=False).bernoulli_(1 - probability, generator=generator)
    return kept.div_(1 - probability)
