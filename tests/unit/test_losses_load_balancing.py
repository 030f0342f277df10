"""The load-balancing loss: transformers' own value, over real tokens only, from sums that any cut adds up to."""

from __future__ import annotations

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from meshtune.losses.load_balancing import add_balance_gradient, load, load_balancing_loss, no_load, pull


def everything(logits: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(logits), dtype=torch.bool)


def test_padding_does_not_count() -> None:
    """C61: two rows of four tokens, of which the last two are padding."""
    torch.manual_seed(0)
    logits = torch.randn(8, 4)
    real = torch.tensor([True] * 6 + [False] * 2)
    found = load_balancing_loss(load(logits, real, top_k=2))
    assert abs(float(found) - 2.0667) < 5e-5
    assert torch.equal(found, load_balancing_loss(load(logits[:6], everything(logits[:6]), top_k=2)))
    assert abs(float(load_balancing_loss(load(logits, everything(logits), 2))) - 2.0307) < 5e-5


def test_balanced_routers_cost_top_k() -> None:
    """Uniform logits of 4 experts, top 2: 2.0."""
    logits = torch.zeros(8, 4)
    assert float(load_balancing_loss(load(logits, everything(logits), top_k=2))) == 2.0


def test_all_routers_count_together_as_in_transformers() -> None:
    logits = tuple(torch.randn(10, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    total = sum(load(each, mask.reshape(-1).bool(), 3) for each in logits)
    torch.testing.assert_close(load_balancing_loss(total).float(), load_balancing_loss_func(logits, 6, 3, mask))


def test_any_cut_of_the_tokens_adds_up() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    parts = sum(load(part, everything(part), 2) for part in logits.split([4, 0, 5]))
    torch.testing.assert_close(parts, load(logits, everything(logits), 2))


def test_the_gradient_is_that_of_the_loss_whatever_the_carrier_is_multiplied_with() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    real = everything(logits)
    real[7:] = False
    total = load(logits, real, 2)
    (wanted,) = torch.autograd.grad(load_balancing_loss_func((logits,), 4, 2, real[None].float()), logits)
    carrier = torch.randn(3, requires_grad=True)
    carried = add_balance_gradient(carrier, logits, real, lambda: pull(total))
    assert torch.equal(carried, carrier)
    (carried.sum() * 123).backward()
    torch.testing.assert_close(logits.grad, wanted)
    assert torch.equal(carrier.grad, torch.full((3,), 123.0))


def test_no_token_costs_nothing() -> None:
    total = no_load(4, torch.device("cpu"))
    assert float(load_balancing_loss(total)) == 0 and not pull(total).any()
    assert torch.equal(load(torch.zeros(0, 4), torch.zeros(0, dtype=torch.bool), 2), total)
