"""Gradients of which each tp rank has a part: added up once, after the last backward of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.layout.peers import Peers


class TensorGradients:
    """Of `parameters` every rank of `peers` holds the whole, and a part of the gradient. None of both: nothing to do."""

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers | None):
        self._parameters = [p for p in parameters if p.requires_grad]
        self._peers = peers

    @torch.no_grad()
    def add_up(self) -> None:
        """In one collective: whether a rank has a gradient at all, and the gradients one after another.

        A parameter without a gradient on any rank keeps none.
        """
        if self._peers is None or not self._parameters:
            return
        flat = torch.cat([self._presence(), *(self._local(p).reshape(-1) for p in self._parameters)])
        flat = self._peers.all_reduce(flat)
        present, rest = flat[: len(self._parameters)], flat[len(self._parameters) :]
        for parameter, count, total in zip(
            self._parameters,
            present.tolist(),
            rest.split([self._local(p).numel() for p in self._parameters]),
            strict=True,
        ):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._local(parameter).copy_(total.view_as(self._local(parameter)))

    def _presence(self) -> Tensor:
        like = self._local(self._parameters[0])
        return torch.tensor([p.grad is not None for p in self._parameters], dtype=like.dtype, device=like.device)

    def _local(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a gradient, zeros in the place of none."""
        gradient = parameter.grad
        if gradient is None:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            return torch.zeros_like(local)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient
