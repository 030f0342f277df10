"""Context parallelism: this rank's part of the tokens of a batch. What it needs of the others', attention gets it."""

from __future__ import annotations

import math
from dataclasses import replace

from meshtune.data.batch import Batch
from meshtune.data.cutting import take
from meshtune.data.padding import pad
from meshtune.layout import zigzag
from meshtune.layout.peers import Peers


def cut(batch: Batch, peers: Peers, multiple: int = 1) -> Batch:
    """The tokens of `batch` that this rank of `peers` works on, a number a row that `multiple` divides.

    Positions and labels are those that the tokens have in the whole batch, which every rank must hand over alike; `tokens` and
    `supervised_tokens` add up to the whole batch's over the ranks.
    """
    whole = pad(batch, peers.size * math.lcm(2, multiple) if peers.size > 1 else multiple)
    if peers.size == 1:
        return whole
    if whole.attention_mask is not None:  # the model's tables of positions may end where rows do
        whole = replace(whole, position_ids=whole.position_ids * whole.attention_mask)
    return take(whole, zigzag.own_tokens(whole.input_ids.shape[1], peers.size, peers.rank))
