"""The load-balancing loss of a mixture of experts, of sums that any cut of the tokens adds up to.

    experts * sum over experts e of  f_e * P_e          (Fedus et al. 2021, equations 4 to 6)

f_e is the number of times that e is among a token's `top_k`, P_e the mean of its probability, both over all routers and all real
tokens together, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_balance_gradient", "load", "load_balancing_loss", "no_load", "pull"]


def load(logits: Tensor, real: Tensor, top_k: int) -> Tensor:
    """Sums of one router over its real tokens, which add up over tokens and over routers.

    logits [N, experts], real [N] bool. Returns [2 * experts + 1] float64: how often each expert is among the `top_k`, the sum of
    its probabilities, and the number of tokens.
    """
    probabilities = logits.detach()[real].softmax(-1, dtype=torch.float32)
    chosen = probabilities.topk(top_k, dim=-1).indices.reshape(-1)
    times = torch.bincount(chosen, minlength=logits.shape[-1])
    exact = _exact(logits.device)
    return torch.cat([times.to(exact), probabilities.sum(0, dtype=exact), real.sum()[None].to(exact)])


def no_load(experts: int, device: torch.device) -> Tensor:
    """What `load` gives for no tokens."""
    return torch.zeros(2 * experts + 1, dtype=_exact(device), device=device)


def load_balancing_loss(total: Tensor) -> Tensor:
    """The loss, 0-d, of the sums that `load` gives; 0 without tokens."""
    times, probabilities, count = _parts(total)
    return len(times) * (times * probabilities).sum() / count.clamp_min(1) ** 2


def pull(total: Tensor) -> Tensor:
    """[experts]: the derivative of `load_balancing_loss` by each expert's sum of probabilities; a choice has none."""
    times, _, count = _parts(total)
    return len(times) * times / count.clamp_min(1) ** 2


def add_balance_gradient(carrier: Tensor, logits: Tensor, real: Tensor, pull: Callable[[], Tensor]) -> Tensor:
    """`carrier` itself; its backward also gives `logits` the gradient of `sum(pull * softmax(logits))` over real tokens.

    The carrier must be on the way to the loss. Whatever the loss is multiplied with, this gradient is not. `pull` is asked for in
    the backward, when the sums over all tokens are there.
    """
    return _AddBalanceGradient.apply(carrier, logits, real, pull)


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _parts(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    experts = len(total) // 2
    return total[:experts], total[experts:-1], total[-1]


class _AddBalanceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, real: Tensor, pull: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.real, ctx.pull = real, pull  # not from a recomputation, which may run beside another micro-batch
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        probabilities = logits.softmax(-1, dtype=torch.float32)
        pull = ctx.pull().to(probabilities.dtype)
        gradient = probabilities * (pull - (probabilities @ pull)[:, None]) * ctx.real[:, None]
        return gradients[0], gradient.to(logits.dtype), None, None
