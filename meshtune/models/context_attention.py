"""Attention of a sequence that is cut over ranks: each holds an early chunk and a late one (`layout.zigzag`).

allgather   keys and values are gathered; each rank's queries see what they need of them
ulysses     tokens are exchanged for heads, so that each rank has whole sequences for some of the heads
ring        keys and values travel from rank to rank, and never lie whole on any
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from meshtune.errors import LayoutError
from meshtune.layout import zigzag
from meshtune.layout.collectives import all_to_all, gather_from
from meshtune.layout.peers import Peers
from meshtune.models.documents import ContextParallel
from meshtune.models.ring_attention import ring
from meshtune.models.scores import Scores, attend_in_document, attend_in_documents


def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, context: ContextParallel, lengths: Sequence[int] | None
) -> Tensor:
    """This rank's tokens of q [B, heads, T / size, head_dim], k and v to its [B, heads, T / size, value_dim].

    `lengths` are those of the whole row's documents; without, each row is one document.
    """
    length = q.shape[2] * context.peers.size
    documents = _spans([length] if lengths is None else lengths)
    if documents[-1].stop != length:
        raise ValueError(f"documents of {documents[-1].stop} tokens in rows of {length}")
    if not scores.causal:
        raise LayoutError("attention that sees later positions cannot run over context-parallel ranks")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (tensor.to(torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
    return _METHODS[context.method](q, k, v, scores, context.peers, documents)


def _spans(lengths: Sequence[int]) -> list[range]:
    stops = list(accumulate(lengths))
    return [range(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _allgather(q: Tensor, k: Tensor, v: Tensor, scores: Scores, peers: Peers, documents: Sequence[range]) -> Tensor:
    both = zigzag.in_sequence(gather_from(torch.cat([k, v], -1), 2, peers), 2, peers.size)
    k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    parts = []
    for chunk, queries in zip(zigzag.own_chunks(peers.size, peers.rank), q.chunk(2, 2), strict=True):
        first = chunk * queries.shape[2]
        for document in documents:
            start, stop = max(first, document.start), min(first + queries.shape[2], document.stop)
            if start < stop:
                seen = slice(document.start, stop)
                own = queries[:, :, start - first : stop - first]
                parts.append(attend_in_document(own, k[:, :, seen], v[:, :, seen], scores, start - document.start))
    return torch.cat(parts, 2)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, scores: Scores, peers: Peers, documents: Sequence[range]) -> Tensor:
    heads, size = q.shape[1], peers.size
    if heads % size:
        raise LayoutError(
            f"cp_method ulysses: {heads} attention heads cannot be shared out over {size} ranks; write allgather or ring"
        )
    copies = size // math.gcd(size, k.shape[1])  # of a key that queries on several ranks see
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    q, k, v = _heads_for_tokens([q, k, v], peers)
    own = scores.of_heads(heads // size * peers.rank, heads // size * (peers.rank + 1))
    output = attend_in_documents(q, k, v, own, [len(document) for document in documents])
    return _tokens_for_heads(output, peers)


def _heads_for_tokens(tensors: list[Tensor], peers: Peers) -> list[Tensor]:
    """Each [B, heads, T / size, d] to [B, heads / size, T, d], in one exchange."""
    parts = [torch.stack(tensor.chunk(peers.size, 1)) for tensor in tensors]
    received = _exchange(torch.cat([part.flatten(1) for part in parts], 1), peers)
    sizes = [part[0].numel() for part in parts]
    whole = (r.view_as(part) for r, part in zip(received.split(sizes, 1), parts, strict=True))
    return [zigzag.in_sequence(torch.cat(part.unbind(), 2), 2, peers.size) for part in whole]


def _tokens_for_heads(tensor: Tensor, peers: Peers) -> Tensor:
    """[B, heads / size, T, d] to [B, heads, T / size, d]."""
    parts = torch.stack(zigzag.by_rank(tensor, 2, peers.size).chunk(peers.size, 2))
    return torch.cat(_exchange(parts, peers).unbind(), 1)


def _exchange(parts: Tensor, peers: Peers) -> Tensor:
    """[size, ...]: part r goes to rank r, and comes from it."""
    one_each = [1] * peers.size
    return all_to_all(parts, one_each, one_each, peers)


_METHODS = {"allgather": _allgather, "ulysses": _ulysses, "ring": ring}
