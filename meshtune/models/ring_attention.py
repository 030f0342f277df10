"""Ring attention: keys and values travel from rank to rank, and no rank ever has them all.

Each rank adds up what its queries get of the keys at hand, as FlashAttention does over blocks (Dao et al. 2022; Liu et al. 2023
for the ring). For the backward only the output and the logarithm of each softmax's sum are kept; keys and values travel once
more, and their gradients with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshtune.errors import LayoutError
from meshtune.layout.peers import Peers
from meshtune.models.scores import Scores
from meshtune.models.tiles import Tile, tiles


def ring(q: Tensor, k: Tensor, v: Tensor, scores: Scores, peers: Peers, documents: Sequence[range]) -> Tensor:
    """This rank's tokens of q [B, heads, T / size, head_dim], k and v to [B, heads, T / size, value_dim]."""
    if scores.dropout:
        raise LayoutError(
            "cp_method ring: attention weights that drop out are not kept for the backward; write allgather"
        )
    scaling = q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    shared = _Ring(replace(scores, scaling=scaling, s_aux=None), peers, documents)
    return _RingAttention.apply(q, k, v, scores.s_aux, shared)


@dataclass(frozen=True)
class _Ring:
    """What forward and backward have in common."""

    scores: Scores
    peers: Peers
    documents: Sequence[range]

    def owners(self) -> Iterator[int]:
        """Whose keys are at hand, step by step."""
        return ((self.peers.rank - step) % self.peers.size for step in range(self.peers.size))

    def tiles(self, keys: Tensor, owner: int) -> Iterator[Tile]:
        size, rank = self.peers.size, self.peers.rank
        return tiles(self.documents, size, rank, owner, keys.shape[2] // 2, self.scores.window, keys.device)

    def pass_on(self, tensor: Tensor) -> Tensor:
        """To the next rank; returns the last one's."""
        size, rank = self.peers.size, self.peers.rank
        sent, received = ([int(r == other % size) for r in range(size)] for other in (rank + 1, rank - 1))
        return self.peers.all_to_all(tensor[None], sent, received)[0]

    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, kv_heads, groups, queries, keys] of q [B, kv_heads, groups, queries, head_dim], in at least float32."""
        assert self.scores.scaling is not None
        products = _exact(q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4]) * self.scores.scaling
        cap = self.scores.softcap
        return products if cap is None else torch.tanh(products / cap) * cap


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, ring: _Ring) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            sums = _Sums(q.unflatten(1, (k.shape[1], -1)), v.shape[-1], ring)
            at_hand = torch.cat([k, v], -1)
            for step, owner in enumerate(ring.owners()):
                at_hand = at_hand if step == 0 else ring.pass_on(at_hand)
                keys, values = at_hand.split([k.shape[-1], v.shape[-1]], -1)
                sums.add(keys, values, owner)
            output, log_sums = sums.finish(s_aux)
        output = output.flatten(1, 2).to(v.dtype)
        ctx.save_for_backward(q, k, v, s_aux, output, log_sums)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, s_aux, output, log_sums = ctx.saved_tensors
        ring: _Ring = ctx.ring
        sizes = [k.shape[-1], v.shape[-1]]
        grouped_q, of_output, output = (t.unflatten(1, (k.shape[1], -1)) for t in (q, gradients[0], output))
        slopes = _Slopes(grouped_q, of_output, output, log_sums, ring)
        at_hand = torch.cat([k, v], -1)
        travelling = torch.zeros_like(_exact(at_hand))
        for step, owner in enumerate(ring.owners()):
            if step > 0:
                at_hand, travelling = ring.pass_on(at_hand), ring.pass_on(travelling)
            (keys, values), (of_keys, of_values) = at_hand.split(sizes, -1), travelling.split(sizes, -1)
            slopes.add(keys, values, of_keys, of_values, owner)
        of_k, of_v = ring.pass_on(travelling).split(sizes, -1)
        of_q = slopes.of_q.flatten(1, 2).to(q.dtype)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None if s_aux is None else slopes.of_sinks(s_aux), None


class _Sums:
    """What queries [B, kv_heads, groups, T / size, head_dim] have got so far: a softmax's numerator and denominator, both over
    the power of the greatest score."""

    def __init__(self, q: Tensor, value_dim: int, ring: _Ring):
        self.q, self.ring = q, ring
        rows = _exact(q.new_zeros(q.shape[:-1]))
        self.greatest = torch.full_like(rows, torch.finfo(rows.dtype).min)
        self.denominator = rows
        self.numerator = rows.new_zeros((*rows.shape, value_dim))

    def add(self, k: Tensor, v: Tensor, owner: int) -> None:
        for tile in self.ring.tiles(k, owner):
            rows = (..., tile.queries)
            scores = self.ring.weigh(self.q[..., tile.queries, :], k[:, :, tile.keys])
            if tile.allowed is not None:
                scores = scores.masked_fill(~tile.allowed, torch.finfo(scores.dtype).min)
            greatest = torch.maximum(self.greatest[rows], scores.amax(-1))
            powers = (scores - greatest[..., None]).exp_()
            values = _exact(powers.to(v.dtype).flatten(2, 3) @ v[:, :, tile.keys]).unflatten(2, scores.shape[2:4])
            kept = (self.greatest[rows] - greatest).exp_()
            self.greatest[rows] = greatest
            self.denominator[rows] = self.denominator[rows] * kept + powers.sum(-1)
            self.numerator[..., tile.queries, :] = self.numerator[..., tile.queries, :] * kept[..., None] + values

    def finish(self, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output, and the logarithm of the sum of powers."""
        if s_aux is not None:
            sinks = _by_head(s_aux, self.q).to(self.greatest)
            greatest = torch.maximum(self.greatest, sinks)
            kept = (self.greatest - greatest).exp()
            self.greatest, self.numerator = greatest, self.numerator * kept[..., None]
            self.denominator = self.denominator * kept + (sinks - greatest).exp()
        return self.numerator / self.denominator[..., None], self.greatest + self.denominator.log()


class _Slopes:
    """Gradients, from those of the output."""

    def __init__(self, q: Tensor, of_output: Tensor, output: Tensor, log_sums: Tensor, ring: _Ring):
        self.q, self.of_output, self.log_sums, self.ring = q, of_output, log_sums, ring
        self.along = (_exact(of_output) * _exact(output)).sum(-1)  # with the sum of a row's weights, which stays one
        self.of_q = torch.zeros_like(_exact(q))

    def add(self, k: Tensor, v: Tensor, of_k: Tensor, of_v: Tensor, owner: int) -> None:
        """Adds to the gradients of keys and values in place."""
        softcap, scaling = self.ring.scores.softcap, self.ring.scores.scaling
        assert scaling is not None
        for tile in self.ring.tiles(k, owner):
            keys, values, rows = k[:, :, tile.keys], v[:, :, tile.keys], (..., tile.queries)
            q, of_output = self.q[..., tile.queries, :], self.of_output[..., tile.queries, :].flatten(2, 3)
            scores = self.ring.weigh(q, keys)
            weights = (scores - self.log_sums[rows][..., None]).exp_()
            if tile.allowed is not None:
                weights = weights.masked_fill(~tile.allowed, 0)
            of_v[:, :, tile.keys] += weights.to(v.dtype).flatten(2, 3).mT @ of_output
            of_weights = _exact(of_output @ values.mT).unflatten(2, scores.shape[2:4])
            of_scores = weights * (of_weights - self.along[rows][..., None]) * scaling
            if softcap is not None:
                of_scores *= 1 - (scores / softcap).square()
            folded = of_scores.to(k.dtype).flatten(2, 3)
            self.of_q[..., tile.queries, :] += (folded @ keys).unflatten(2, scores.shape[2:4])
            of_k[:, :, tile.keys] += folded.mT @ q.flatten(2, 3)

    def of_sinks(self, s_aux: Tensor) -> Tensor:
        weights = (_by_head(s_aux, self.q).to(self.log_sums) - self.log_sums).exp()
        return -(weights * self.along).sum((0, 3)).view_as(s_aux).to(s_aux.dtype)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _by_head(s_aux: Tensor, q: Tensor) -> Tensor:
    return s_aux.reshape(1, q.shape[1], q.shape[2], 1)
