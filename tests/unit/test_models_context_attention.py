"""Attention over context-parallel ranks: every token gets what it gets when the sequence lies in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.errors import LayoutError
from meshtune.layout import AXES, Layout, zigzag
from meshtune.layout.simulated import simulate
from meshtune.models import scores, tiles
from meshtune.models.attention import document_attention
from meshtune.models.documents import ContextParallel, documents

METHODS = ["allgather", "ulysses", "ring"]
LENGTHS = [13, 1, 20, 1, 1, 8, 4]  # 48 tokens: chunks of 12, 8 and 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaling": {"scaling": 0.3},
    "window": {"sliding_window": 4},
    "window-of-one": {"sliding_window": 1},
    "long-window": {"sliding_window": 17},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": True},
    "all": {"sliding_window": 5, "softcap": 1.5, "s_aux": True, "scaling": 0.3},
}


class _Layer(nn.Module):
    is_causal = True


def _inputs(heads: int, kv_heads: int, rows: int = 1, value_dim: int = 8) -> list[Tensor]:
    """q, k, v, sinks and the weights of a loss."""
    generator = torch.Generator().manual_seed(0)
    length = sum(LENGTHS)
    shapes = [(rows, heads, length, 8), (rows, kv_heads, length, 8), (rows, kv_heads, length, value_dim), (heads,)]
    return [torch.randn(shape, generator=generator) for shape in (*shapes, (rows, length, heads, value_dim))]


def _attend(
    inputs: list[Tensor], settings: dict[str, Any], lengths: list[int] | None, context: Any = None
) -> list[Tensor]:
    """Output, and the gradients of q, k, v and sinks."""
    q, k, v, sinks, weights = (tensor.clone().requires_grad_() for tensor in inputs)
    settings = {**settings, "s_aux": sinks} if "s_aux" in settings else settings
    with documents(lengths, context):
        output = document_attention(_Layer(), q, k, v, None, **settings)[0]
    wanted = [q, k, v] + [sinks] * ("s_aux" in settings)
    return [output.detach(), *torch.autograd.grad((output * weights.detach()).sum(), wanted)]


def _over_ranks(
    size: int, method: str, inputs: list[Tensor], settings: dict[str, Any], lengths: list[int] | None
) -> list[Tensor]:
    """The same as `_attend`, put together from what each rank has."""

    def work(rank: Layout) -> list[Tensor]:
        peers = rank.peers("cp")
        tokens = zigzag.own_tokens(sum(LENGTHS), size, peers.rank)
        *qkv, sinks, weights = inputs
        own = [*(tensor[:, :, tokens] for tensor in qkv), sinks, weights[:, tokens]]
        return _attend(own, settings, lengths, ContextParallel(peers, method))

    ranks = simulate(Layout({axis: size if axis == "cp" else 1 for axis in AXES}), work)
    output, *gradients = (list(parts) for parts in zip(*ranks, strict=True))
    by_token = [(output, 1), *((parts, 2) for parts in gradients[:3])]
    whole = [zigzag.in_sequence(torch.cat(parts, dim), dim, size) for parts, dim in by_token]
    return [*whole, *(torch.stack(parts).sum(0) for parts in gradients[3:])]


def _assert_same(
    size: int, method: str, inputs: list[Tensor], settings: dict[str, Any], lengths: list[int] | None
) -> None:
    found, wanted = _over_ranks(size, method, inputs, settings, lengths), _attend(inputs, settings, lengths)
    for name, a, b in zip(("output", "q", "k", "v", "sinks"), found, wanted, strict=False):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5 * max(1.0, b.abs().max().item()), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("lengths", [LENGTHS, None], ids=["packed", "whole rows"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_cut_sequence_gets_what_a_whole_one_gets(
    method: str, name: str, size: int, lengths: list[int] | None
) -> None:
    inputs = _inputs(heads=12, kv_heads=4, rows=1 if lengths else 2)
    _assert_same(size, method, inputs, SETTINGS[name], lengths)


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize("name", ["plain", "window", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_any_size(method: str, name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK", block)
    monkeypatch.setattr(tiles, "QUERIES", block)
    monkeypatch.setattr(tiles, "KEYS", block + 2)
    _assert_same(2, method, _inputs(heads=2, kv_heads=1), SETTINGS[name], LENGTHS)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("method", METHODS)
def test_heads_that_share_keys_in_any_number_and_values_of_another_size(method: str, kv_heads: int) -> None:
    _assert_same(3, method, _inputs(heads=6, kv_heads=kv_heads, value_dim=5), SETTINGS["sinks"], LENGTHS)


def test_ulysses_refuses_heads_that_it_cannot_share_out() -> None:
    with pytest.raises(
        LayoutError, match="5 attention heads cannot be shared out over 3 ranks; write allgather or ring"
    ):
        _over_ranks(3, "ulysses", _inputs(heads=5, kv_heads=5), {}, None)


def test_attention_to_later_positions_is_refused() -> None:
    with pytest.raises(LayoutError, match="later positions"):
        _over_ranks(2, "allgather", _inputs(heads=2, kv_heads=2), {"is_causal": False}, None)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_within_its_rounding(method: str) -> None:
    inputs = [tensor.bfloat16() for tensor in _inputs(heads=4, kv_heads=2)]
    found = _over_ranks(2, method, inputs, SETTINGS["all"], LENGTHS)
    exact = _attend([tensor.float() for tensor in inputs], SETTINGS["all"], LENGTHS)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=4e-2, atol=4e-2 * b.abs().max().item())


@pytest.mark.parametrize("method", METHODS)
def test_autocast_reaches_every_method(method: str) -> None:
    """Rotary embeddings may leave queries and keys in another dtype than values."""
    q, k, v, sinks, weights = _inputs(heads=4, kv_heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = _attend([q, k, v, sinks, weights], {}, LENGTHS)

    def work(rank: Layout) -> Tensor:
        peers = rank.peers("cp")
        tokens = zigzag.own_tokens(sum(LENGTHS), 2, peers.rank)
        own = [q[:, :, tokens], k[:, :, tokens], v[:, :, tokens].bfloat16(), sinks, weights[:, tokens]]
        with torch.autocast("cpu", torch.bfloat16):
            return _attend(own, {}, LENGTHS, ContextParallel(peers, method))[0]

    parts = simulate(Layout({axis: 2 if axis == "cp" else 1 for axis in AXES}), work)
    found = zigzag.in_sequence(torch.cat(parts, 1), 1, 2)
    assert found.dtype == wanted[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted[0], rtol=4e-2, atol=4e-2)
