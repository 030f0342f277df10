"""What a recipe minimises: functions from model and batch to (loss_sum, count, metrics)."""

from __future__ import annotations

from torch import Tensor

from meshtune.data.batch import Batch
from meshtune.losses import linear_cross_entropy
from meshtune.models.causal_lm import CausalLM


def next_token(model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed cross-entropy of the supervised next tokens, and their number; the head sees no other position."""
    hidden_states = model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask)
    supervised = batch.shift_labels != -100
    targets = batch.shift_labels[supervised]
    loss_sum = linear_cross_entropy(
        hidden_states[supervised], targets, model.head, model.head_parameters, vocabulary=model.vocabulary
    )
    return loss_sum, supervised.sum(), {}
