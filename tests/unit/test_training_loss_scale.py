"""The loss scale of fp16: torch.amp.GradScaler's rule, and what a step does with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import nn

from meshtune.optim.grad_norm import clip_grad_norm_
from meshtune.training.loss_scale import LossScale


def verdicts() -> Iterator[bool]:
    """Whether each step's gradients are finite, with runs of both."""
    drawn = random.Random(0)
    return (drawn.random() < 0.9 for _ in range(300))


def test_the_scale_follows_torchs_grad_scaler() -> None:
    """Step by step the same scale, with its own constants but for an interval that a test can wait for."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    defaults = torch.amp.GradScaler("cpu")
    assert defaults.get_scale() == LossScale.INITIAL
    assert defaults.get_growth_interval() == LossScale.GROWTH_INTERVAL
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum())  # it has no scale before it was used
    with patch.object(LossScale, "GROWTH_INTERVAL", 5):
        scale = LossScale()
        for finite in verdicts():
            weight.grad = torch.tensor([1.0 if finite else torch.inf])
            scaler.step(optimizer)
            scaler.update()
            if finite:
                scale.took()
            else:
                scale.lower()
            assert scale.value == scaler.get_scale()


def test_a_resumed_scale_goes_on_as_if_nothing_had_been() -> None:
    straight, resumed = LossScale(), LossScale()
    for finite in verdicts():
        for scale in (straight, resumed):
            scale.took() if finite else scale.lower()
        fresh = LossScale()
        fresh.load_state_dict(resumed.state_dict())
        resumed = fresh
    assert resumed == straight
    resumed.load_state_dict({})  # a run that was not fp16 before
    assert resumed == LossScale()


@pytest.mark.parametrize(
    ("value", "loss", "norm", "overflow"),
    [
        (2.0**16, 1.0, torch.inf, True),
        (2.0**16, 1.0, torch.nan, True),
        (2.0**16, 1.0, 5.0, False),
        (2.0**16, torch.inf, torch.nan, False),  # the forward itself
        (1.0, 1.0, torch.inf, False),  # nothing is left to lower
    ],
)
def test_what_the_scale_is_to_blame_for(value: float, loss: float, norm: float, overflow: bool) -> None:
    assert LossScale(value).overflowed(loss, norm) is overflow


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_clipping_takes_the_scale_out_of_gradients(max_norm: float | None) -> None:
    """A power of two in and out again changes no bit."""
    plain, scaled = (nn.Parameter(torch.zeros(7)) for _ in range(2))
    plain.grad = torch.linspace(-1, 1, 7)
    scaled.grad = plain.grad * 2.0**16
    norm = plain.grad.norm()
    clip_grad_norm_([plain], max_norm, norm)
    clip_grad_norm_([scaled], max_norm, norm, 2.0**16)
    assert torch.equal(plain.grad, scaled.grad)
