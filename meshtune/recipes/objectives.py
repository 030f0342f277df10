"""What a recipe minimises: functions from model and batch to (loss_sum, count, metrics)."""

from __future__ import annotations

from torch import Tensor

from meshtune.data.batch import IGNORED_LABEL, Batch
from meshtune.losses import linear_cross_entropy, token_scores
from meshtune.models.causal_lm import CausalLM


def next_token(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed cross-entropy of the supervised next tokens, and their number; the head sees no other position."""
    hidden_states, targets = _supervised(model, batch)
    loss_sum = linear_cross_entropy(
        hidden_states,
        targets,
        model.head,
        model.head_parameters,
        vocabulary=model.vocabulary,
        gradient_scale=model.gradient_scale,
    )
    return loss_sum, (batch.shift_labels != IGNORED_LABEL).sum(), {}


def next_token_scores(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same with [2] in the place of the sum: the cross-entropy, and how many of the tokens are the likeliest ones."""
    hidden_states, targets = _supervised(model, batch)
    scores = token_scores(hidden_states, targets, model.head, vocabulary=model.vocabulary)
    return scores, (batch.shift_labels != IGNORED_LABEL).sum(), {}


def _supervised(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states [n, hidden] of the positions that carry a loss, and their targets [n]."""
    hidden_states = model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask)
    supervised = batch.shift_labels != IGNORED_LABEL
    return hidden_states[supervised], batch.shift_labels[supervised]
