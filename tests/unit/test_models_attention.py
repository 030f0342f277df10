"""Attention per document: what a document gets in a packed row is what it gets alone, in values and in gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.models import scores
from meshtune.models.attention import DOCUMENT_ATTENTION, document_attention
from meshtune.models.causal_lm import CausalLM
from meshtune.models.documents import documents
from tests.unit.models_tiny import tiny_model

LENGTHS = [11, 1, 9, 2]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaling": {"scaling": 0.3},
    "window": {"sliding_window": 4},
    "window-of-one": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 5, "softcap": 1.5, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "scaling": 0.3},
    "not-causal": {"is_causal": False},
    "not-causal-window": {"is_causal": False, "sliding_window": 3},
    "not-causal-softcap": {"is_causal": False, "softcap": 1.5},
}


class _Layer(nn.Module):
    is_causal = True


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 8) for heads in (4, 2, 2)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _by_formula(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> Tensor:
    """One document's attention in float64, as the papers write it: [1, heads, L, head_dim] to [1, L, heads, head_dim]."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.mT * settings.get("scaling", q.shape[-1] ** -0.5)
    if cap := settings.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = distance >= 0 if settings.get("is_causal", True) else torch.ones_like(distance, dtype=torch.bool)
    if window := settings.get("sliding_window"):
        seen = seen & (distance.abs() < window)
    powers = scores.masked_fill(~seen, -torch.inf).exp()
    sink = settings.get("s_aux", torch.full((4,), -torch.inf)).double().exp().view(1, 4, 1, 1)
    return (powers / (powers.sum(-1, keepdim=True) + sink) @ v).transpose(1, 2)


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("name", SETTINGS)
def test_documents_get_what_the_formula_gives_each_alone(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "BLOCK", block)
    packed, alone = _inputs(), _inputs()
    weights = torch.randn(1, sum(LENGTHS), 4, 8)
    with documents(LENGTHS):
        found = document_attention(_Layer(), *packed, None, **SETTINGS[name])[0]
        (found * weights).sum().backward()
    parts = zip(*(tensor.split(LENGTHS, 2) for tensor in alone), strict=True)
    wanted = torch.cat([_by_formula(*part, SETTINGS[name]) for part in parts], 1)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "window", "softcap", "sinks"])
def test_bfloat16_is_within_its_rounding(name: str) -> None:
    packed = _inputs(torch.bfloat16)
    with documents(LENGTHS):
        found = document_attention(_Layer(), *packed, None, **SETTINGS[name])[0]
    parts = zip(*(tensor.split(LENGTHS, 2) for tensor in packed), strict=True)
    wanted = torch.cat([_by_formula(*part, SETTINGS[name]) for part in parts], 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def test_a_window_is_computed_in_blocks_and_never_as_one_square(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = scores.F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any, **settings: Any) -> Tensor:
        sizes.append(mask.numel())
        return real(q, k, v, mask, *rest, **settings)

    monkeypatch.setattr(scores.F, "scaled_dot_product_attention", watched)
    q = torch.randn(1, 1, 4096, 4)
    document_attention(_Layer(), q, q, q, None, sliding_window=256)
    assert sum(sizes) <= 4096 * 512 and max(sizes) <= 256 * 512


def test_dropout_falls_in_training_only() -> None:
    q, k, v = _inputs()
    layer = _Layer()
    for settings in ({}, {"softcap": 1.5}):
        exact = document_attention(layer.eval(), q, k, v, None, dropout=0.5, **settings)[0]
        assert torch.equal(exact, document_attention(layer, q, k, v, None, **settings)[0])
        dropped = document_attention(layer.train(), q, k, v, None, dropout=0.5, **settings)[0]
        assert not torch.allclose(exact, dropped)


def test_documents_of_an_inner_block_end_with_it_even_by_an_error() -> None:
    q, k, v = _inputs()
    with documents([5, 18]):
        outer = document_attention(_Layer(), q, k, v, None)[0]
        with pytest.raises(KeyError), documents(LENGTHS):
            raise KeyError
        assert torch.equal(outer, document_attention(_Layer(), q, k, v, None)[0])
    whole = document_attention(_Layer(), q, k, v, None)[0]
    assert not torch.allclose(outer, whole)


@pytest.mark.parametrize("name", ["llama-odd", "qwen2-window", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "activation-checkpointing"])
def test_a_packed_row_trains_as_its_documents_do_under_eager(name: str, checkpointing: bool) -> None:
    """C29, C30: values and the gradient of every parameter; recomputed activations see the same documents."""
    alone, packed = CausalLM(tiny_model(name)).train(), CausalLM(tiny_model(name, DOCUMENT_ATTENTION)).train()
    if checkpointing:
        packed.model.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(4, 90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    wanted = torch.cat(
        [alone.hidden_states(part, torch.arange(part.shape[1])[None], None) for part in ids.split(LENGTHS, 1)], 1
    )
    weights = torch.randn(wanted.shape)
    (wanted * weights).sum().backward()
    with documents(LENGTHS):
        found = packed.hidden_states(ids, positions, None)
        (found * weights).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for (path, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4 * b.grad.abs().max().item(), msg=path)
