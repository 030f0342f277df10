"""A twin, trained on one micro-batch whole and with its experts shared out over simulated ranks: every gradient must agree."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from meshtune.layout import Layout
from meshtune.layout.experts import Experts
from meshtune.layout.pieces import named_pieces
from meshtune.layout.simulated import simulate
from meshtune.models.twin import one_line
from meshtune.parallel.experts import share_out
from meshtune.recipes.block_proof import whole_gradients
from meshtune.recipes.model_proof import differs, one_row, train

_TOKENS = 12
_RANKS = 2


def disagreement_over_experts(twin: PreTrainedModel, experts: Sequence[Experts]) -> str | None:
    """None if `twin` trains as it does whole when two ranks, which read the same row, share out its `experts`."""
    batch = one_row(twin, _TOKENS)
    wanted = train(copy.deepcopy(twin), batch)

    def shared_out(layout: Layout) -> dict[str, Tensor]:
        model = copy.deepcopy(twin)
        for found in experts:
            share_out(model, found, layout)
        gradients = train(model, batch)
        gradients.update(whole_gradients(model, gradients, (), layout.peers("ep")))
        for name in named_pieces(model):
            gradients[name] = gradients[name] / _RANKS  # each expert has seen both rows
        return gradients

    layout = Layout({"pp": 1, "dp_replicate": 1, "dp_shard": _RANKS, "cp": 1, "tp": 1}, ep=_RANKS)
    try:
        ranks = simulate(layout, shared_out)
    except Exception as error:
        return f"it does not run ({one_line(error)})"
    return next((problem for found in ranks if (problem := differs(found, wanted)) is not None), None)
