"""Ranges of quantised integers over tokens' features, or over rows of a weight, of which each tp rank has a part."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase, IntxFakeQuantizer

from meshtune.layout.peers import Peers

__all__ = ["OverRanks"]


class OverRanks(IntxFakeQuantizer):
    """The fake quantiser `like`, whose scales follow from the smallest and the largest number of all ranks.

    Groups of a row lie on one rank and have their own scales as they are.
    """

    def __init__(self, like: FakeQuantizerBase | None, peers: Peers):
        assert isinstance(like, IntxFakeQuantizer)
        super().__init__(like.config)
        self._peers = peers

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.config.granularity, PerGroup):
            return super().forward(x)
        # A scale is made from the range alone, which two more numbers widen to that of all ranks.
        return super().forward(torch.cat([x, self._bounds(x)], -1))[..., : x.shape[-1]]

    @torch.no_grad()
    def _bounds(self, x: Tensor) -> Tensor:
        """[..., 2]: smallest and largest over the last dimension, of all ranks."""
        negated = torch.stack([-x.amin(-1), x.amax(-1)], -1)
        least, most = self._peers.all_reduce(negated, "max").unbind(-1)
        return torch.stack([-least, most], -1)
