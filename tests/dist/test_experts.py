"""Experts shared out over process groups and sharded where several ranks hold the same ones: the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtune.layout import AXES, Layout
from meshtune.models.experts import experts_modules
from meshtune.parallel.activation_checkpointing import checkpoint_activations
from meshtune.parallel.experts import dispatch, shard_experts
from tests.ranks import Ranks
from tests.unit.models_tiny import tiny_model

LENGTHS = (9, 2, 7, 1)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (1, length), generator=generator) for length in LENGTHS]


def loss_of(model: nn.Module, row: Tensor) -> Tensor:
    logits = model(input_ids=row, use_cache=False).logits
    return (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).square().sum()


def shard(model: PreTrainedModel, layout: Layout) -> None:
    for experts in experts_modules(model):
        module, share, rank = model.get_submodule(experts.path), experts.share(layout.ep), layout.rank("ep")
        for name in experts.parameters:
            whole = getattr(module, name).detach()
            setattr(module, name, nn.Parameter(whole[rank * share : (rank + 1) * share].clone()))
        dispatch(module, experts, layout)
        shard_experts(module, layout)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=layout.data_parallel_mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)


def on_ranks(name: str, degrees: dict[str, int], ep: int, checkpointing: bool) -> tuple[int, dict[str, Any]]:
    layout = Layout({axis: degrees.get(axis, 1) for axis in AXES}, ep=ep).connect()
    model = tiny_model(name).train()
    if checkpointing:
        checkpoint_activations(model, "full")
    shard(model, layout)
    for _ in range(2):  # as two micro-batches
        loss_of(model, rows()[layout.rank("batch")]).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor()
    return layout.rank("ep"), found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "degrees", "ep"),
    [
        ("mixtral", {"dp_shard": 4}, 2),
        ("deepseek_v3", {"dp_shard": 4}, 4),
        ("gpt_oss", {"dp_replicate": 2, "dp_shard": 2}, 2),
    ],
)
def test_gradients_are_those_of_one_process(
    ranks: Ranks, name: str, degrees: dict[str, int], ep: int, checkpointing: bool
) -> None:
    results = ranks.call(4, on_ranks, name, degrees, ep, checkpointing)
    model = tiny_model(name).train()
    parts = {f"{experts.path}.{part}" for experts in experts_modules(model) for part in experts.parameters}
    whole = copy.deepcopy(model)
    for row in rows():
        (2 * loss_of(whole, row)).backward()
    by_rank_of_ep = dict(results)
    for key, parameter in whole.named_parameters():
        for _, gradients in results:
            found = gradients[key]
            if key in parts:
                found = torch.cat([by_rank_of_ep[rank][key] for rank in range(ep)])
            assert (found - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-7, key
