"""A twin, trained on one micro-batch whole and cut over simulated tensor-parallel ranks: loss and every gradient must agree.

What blocks alone do not show is shown here: vocabulary and head, sequence parallelism, and what the model does between blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtune.data.batch import Batch
from meshtune.layout import Layout, Plan
from meshtune.layout.simulated import simulate
from meshtune.models.causal_lm import CausalLM
from meshtune.models.twin import one_line, row_of_tokens
from meshtune.parallel.tensor import parallelize, shared_parameters
from meshtune.recipes.block_proof import whole_gradients
from meshtune.recipes.objectives import next_token

_TOKENS_A_RANK = 6
_TOLERANCE = 1e-4


def disagreement(twin: PreTrainedModel, declare: Callable[[PreTrainedModel], Plan], layout: Layout) -> str | None:
    """None if `twin`, cut by the plan that `declare` gives it for the tp ranks of `layout`, trains as it does whole."""
    size = layout.size("tp")
    batch = one_row(twin, _TOKENS_A_RANK * size)
    wanted = train(copy.deepcopy(twin), batch)
    only_tp = replace(layout, degrees={**dict.fromkeys(layout.degrees, 1), "tp": size}, ep=1)

    def cut(layout: Layout) -> dict[str, Tensor]:
        model = copy.deepcopy(twin)
        plan = declare(model)
        parallelize(model, plan, layout)
        found = train(model, batch, layout)
        found.update(whole_gradients(model, found, shared_parameters(model, plan, layout), layout.peers("tp")))
        return found

    try:
        ranks = simulate(only_tp, cut)
    except Exception as error:
        return f"it does not run ({one_line(error)})"
    return next((problem for found in ranks if (problem := differs(found, wanted)) is not None), None)


def one_row(twin: PreTrainedModel, length: int) -> Batch:
    """A row of tokens, two of three of them supervised."""
    row = row_of_tokens(twin, length)[None]
    labels = torch.cat([row[:, 1:], torch.full((1, 1), -100)], 1)
    labels[:, ::3] = -100
    return Batch(input_ids=row, position_ids=torch.arange(length)[None], shift_labels=labels, tokens=length)


def train(model: PreTrainedModel, batch: Batch, layout: Layout | None = None) -> dict[str, Tensor]:
    """The loss, under its name, and the gradient of every parameter."""
    root = CausalLM(model.train())
    if layout is not None:
        root.set_layout(layout)
    loss = root(next_token, batch)[0]
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"the loss": loss.detach(), **gradients}


def differs(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str | None:
    floor = max(float(gradient.abs().max()) for gradient in wanted.values()) * 1e-4
    for name, right in wanted.items():
        error = float((found[name] - right).abs().max() / right.abs().max().clamp_min(floor))
        if not error < 10 * _TOLERANCE:
            return f"{name} differs by {error:.1e}"
    return None
