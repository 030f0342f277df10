"""Try a sequence cut over ranks, which are threads, on a twin: do its tokens get what they have in one piece?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtune.data.batch import Batch
from meshtune.data.cutting import take
from meshtune.data.padding import pad
from meshtune.layout import AXES, Layout, zigzag
from meshtune.layout.simulated import simulate
from meshtune.models.causal_lm import CausalLM
from meshtune.models.documents import ContextParallel

if TYPE_CHECKING:
    from meshtune.models.trial import Reference

_RANKS = 2  # whether tokens are cut apart in one place or in more makes no difference to an architecture


def compare_cut(twin: PreTrainedModel, reference: Reference, method: str) -> str | None:
    """None if every token of `reference` has its hidden state and gives its gradient when the batch is cut.

    A gradient of the CPU runs in the thread that asks for it, so that ranks can meet there: `twin` must be on the CPU.
    """
    twin.train()
    layout = Layout({axis: _RANKS if axis == "cp" else 1 for axis in AXES})
    whole = pad(reference.batch, 2 * _RANKS)
    probe = _placed(reference.probe, whole)

    def work(rank: Layout) -> tuple[Tensor, Tensor]:
        peers = rank.peers("cp")
        tokens = zigzag.own_tokens(probe.shape[1], peers.size, peers.rank)
        return _run(CausalLM(twin, ContextParallel(peers, method)), take(whole, tokens), probe[:, tokens])

    parts = simulate(layout, work)
    joined = zigzag.in_sequence(torch.cat([hidden_states for hidden_states, _ in parts], 1), 1, _RANKS)
    gradient = torch.stack([gradient for _, gradient in parts]).sum(0)
    return reference.problem(joined[_real(whole)], gradient, "cutting the sequence over ranks")


def _run(model: CausalLM, part: Batch, probe: Tensor) -> tuple[Tensor, Tensor]:
    weight = model.model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    with model.documents(part):
        hidden_states = model.hidden_states(part.input_ids, part.position_ids, part.attention_mask)
        gradient = torch.autograd.grad((hidden_states * probe).sum(), weight)[0]
    return hidden_states.detach(), gradient


def _real(whole: Batch) -> Tensor:
    """[B, T] bool: true where a token of the reference lies."""
    if whole.attention_mask is not None:
        return whole.attention_mask
    return (torch.arange(whole.input_ids.shape[1]) < whole.tokens).expand_as(whole.input_ids)


def _placed(rows: Tensor, whole: Batch) -> Tensor:
    """[N, hidden] of the reference's tokens to [B, T, hidden], zero elsewhere."""
    placed = rows.new_zeros((*whole.input_ids.shape, rows.shape[-1]))
    placed[_real(whole)] = rows
    return placed
