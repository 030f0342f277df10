"""The gradient of balance is that of transformers' own loss over the whole global batch, however the batch is cut (C60)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtune.data.batch import Batch
from meshtune.data.collate import as_filler, collate_packed, collate_padded
from meshtune.data.padding import pad_to
from meshtune.layout import AXES, Layout
from meshtune.layout.simulated import simulate
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.causal_lm import CausalLM
from meshtune.models.routers import balancing
from meshtune.parallel.activation_checkpointing import checkpoint_activations
from meshtune.parallel.balance import Balance, route_only
from meshtune.recipes.objectives import next_token
from meshtune.training.step import Objective
from tests.unit.models_tiny import tiny_model

Gradients = dict[str, Tensor]
COEFFICIENT = 0.5
LENGTHS = (9, 5, 7, 3)


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [(draw.integers(3, 97, n), np.ones(n, dtype=bool)) for n in LENGTHS]


def model_of(name: str, coefficient: float = COEFFICIENT) -> PreTrainedModel:
    return tiny_model(name, output_router_logits=True, router_aux_loss_coef=coefficient).train()


def whole(model: PreTrainedModel, batch: Batch) -> tuple[float, Gradients]:
    """The value of balance, and the gradients, of transformers' own loss on all rows in one forward."""
    own = copy.deepcopy(model)
    labels = torch.full_like(batch.input_ids, -100)
    labels[:, 1:] = batch.shift_labels[:, :-1]
    output = own(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), labels=labels, use_cache=False)
    output.loss.backward()
    return output.aux_loss.item(), gradients(own)


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def layout_of(**degrees: int) -> Layout:
    return Layout({axis: degrees.get(axis, 1) for axis in AXES})


def train(
    model: PreTrainedModel,
    layout: Layout,
    batches: Sequence[Batch],
    supervised: int,
    shared: Sequence[str] = (),
    checkpointing: bool = False,
    weight: float = 1.0,
) -> tuple[float, Gradients]:
    """One step of this rank: a single micro-batch is counted as it is trained on."""
    root = CausalLM(copy.deepcopy(model))
    if checkpointing:
        checkpoint_activations(root.model, "full")
    declared = balancing(model)
    assert declared is not None
    balance = Balance(root, root.model, declared, layout, shared)
    if len(batches) == 1:
        with balance.counting():
            loss_sum = run(root, next_token, batches[0])
        value = balance.settle()
        (loss_sum * weight / supervised).backward()
    else:
        with balance.counting(), torch.no_grad():
            for batch in batches:
                run(root, route_only, batch)
        value = balance.settle()
        for batch in batches:
            (run(root, next_token, batch) * weight / supervised).backward()
    return float(value), gradients(root.model)


def run(root: CausalLM, objective: Objective, batch: Batch) -> Tensor:
    with root.documents(batch):
        return root(objective, batch)[0]


def assert_same(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + 1e-7, name


def summed(ranks: Sequence[Gradients]) -> Gradients:
    return {name: torch.stack([rank[name] for rank in ranks]).sum(0) for name in ranks[0]}


def micro_batches(count: int, packed: bool) -> list[Batch]:
    """The four documents, in order, in `count` micro-batches."""
    rows = documents()
    per = len(rows) // count
    parts = [rows[start : start + per] for start in range(0, len(rows), per)]
    return [collate_packed(part) if packed else collate_padded(part, pad_token_id=0) for part in parts]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_balance_is_that_of_the_global_batch(name: str, ranks: int, accumulation: int) -> None:
    model = model_of(name)
    batch = collate_padded(documents(), pad_token_id=0)
    value, wanted = whole(model, batch)
    parts = micro_batches(ranks * accumulation, packed=False)

    def work(layout: Layout) -> tuple[float, Gradients]:
        return train(model, layout, parts[layout.rank("batch") :: ranks], batch.supervised_tokens)

    results = simulate(layout_of(dp_shard=ranks), work)
    assert all(abs(found - value) < 1e-5 * value for found, _ in results)
    assert_same(summed([found for _, found in results]), wanted)
    _, without = whole(model_of(name, coefficient=0.0), batch)
    router = next(name for name in wanted if "gate.weight" in name or "router.weight" in name)
    assert (wanted[router] - without[router]).norm() > 1e-2 * without[router].norm()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_packed_rows_fillers_and_padding_change_nothing(accumulation: int) -> None:
    model = model_of("mixtral")
    batch = collate_padded(documents(), pad_token_id=0)
    value, wanted = whole(model, batch)
    model.set_attn_implementation(DOCUMENT_ATTENTION)
    packed = [pad_to(part, 30) for part in micro_batches(accumulation, packed=True)]
    if accumulation > 1:
        packed.append(as_filler(packed[0]))

    found, own = train(model, one_rank(), packed, batch.supervised_tokens)
    assert abs(found - value) < 1e-5 * value
    assert_same(own, wanted)


def one_rank() -> Layout:
    (layout,) = simulate(layout_of(), lambda layout: layout)
    return layout


@pytest.mark.parametrize("accumulation", [1, 2])
def test_activation_checkpointing_counts_once(accumulation: int) -> None:
    model = model_of("mixtral")
    batch = collate_padded(documents(), pad_token_id=0)
    value, wanted = whole(model, batch)
    parts = micro_batches(accumulation, packed=False)
    found, own = train(model, one_rank(), parts, batch.supervised_tokens, checkpointing=True)
    assert abs(found - value) < 1e-5 * value
    assert_same(own, wanted)


@pytest.mark.parametrize("partial", [True, False])
def test_ranks_of_tp_count_the_tokens_that_they_all_have_once(partial: bool) -> None:
    """Where each has a part of a router's gradient, one of them gives that of balance; where each has all of it, each does."""
    model = model_of("mixtral")
    batch = collate_padded(documents(), pad_token_id=0)
    value, wanted = whole(model, batch)
    shared = [name for name, _ in model.named_parameters()] if partial else []

    def work(layout: Layout) -> tuple[float, Gradients]:
        weight = float(layout.rank("tp") == 0) if partial else 1.0
        return train(model, layout, [batch], batch.supervised_tokens, shared, weight=weight)

    results = simulate(layout_of(tp=2), work)
    assert all(abs(found - value) < 1e-5 * value for found, _ in results)
    own = [found for _, found in results]
    for found in [summed(own)] if partial else own:
        assert_same(found, wanted)


def test_a_stage_without_routers_keeps_step() -> None:
    """It has nothing to count, and takes part in the sum."""
    model = model_of("mixtral")
    batch = collate_padded(documents(), pad_token_id=0)
    value, _ = whole(model, batch)

    def work(layout: Layout) -> float:
        root = CausalLM(copy.deepcopy(model))
        declared = balancing(model)
        assert declared is not None
        for index, layer in enumerate(root.model.model.layers):
            if layout.rank("pp") != index:
                layer.mlp.gate = Lookalike(layer.mlp.gate)
        balance = Balance(root, root.model, declared, layout)
        with balance.counting(), torch.no_grad():
            root(route_only, batch)
        return float(balance.settle())

    results = simulate(layout_of(pp=3), work)
    assert all(abs(found - value) < 1e-5 * value for found in results)


class Lookalike(torch.nn.Module):
    """A router that belongs to another stage."""

    def __init__(self, router: torch.nn.Module):
        super().__init__()
        self.router = [router]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.router[0](hidden_states)


def test_a_backward_before_the_count_is_an_error() -> None:
    model = model_of("mixtral")
    declared = balancing(model)
    assert declared is not None
    root = CausalLM(model)
    Balance(root, model, declared, one_rank())
    with pytest.raises(RuntimeError, match="settle"):
        root(next_token, collate_padded(documents(), pad_token_id=0))[0].backward()
