"""Shards whose rows a library has chosen (`strategy: megatron_fsdp`): checkpoints and exports know them by their pieces."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshtune.checkpoint.state import OptimizerState, model_state
from meshtune.layout.pieces import Piece, set_piece
from meshtune.models.gathering import whole_tensors
from tests.ranks import Ranks

ROWS = {"weight": [(0, 2), (2, 5)], "bias": [(0, 7), (7, 0)]}


def model(scale: float) -> nn.Linear:
    """[7, 3]: rank 0 has rows 0 and 1 of the weight, and all of the bias. DTensor would say 4 and 3."""
    linear, mesh = nn.Linear(3, 7), init_device_mesh("cpu", (2,))
    for name, whole in (("weight", torch.arange(21.0).view(7, 3)), ("bias", torch.arange(7.0))):
        start, length = ROWS[name][dist.get_rank()]
        local = whole.narrow(0, start, length).clone() * scale
        shape, stride = whole.shape, whole.stride()
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        setattr(linear, name, nn.Parameter(shard))
        set_piece(linear, name, Piece("fsdp", tuple(shape), 0, ((start, length),)))
    return linear


def optimizer_of(linear: nn.Linear) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.0)
    for parameter in linear.parameters():
        parameter.grad = parameter.detach().clone() if parameter.to_local().numel() else None
    optimizer.step()
    return optimizer


def save_load_and_gather(folder: Path) -> tuple[dict, list, dict]:
    saved, loaded = model(1.0), model(0.0)
    states = []
    for linear in (saved, loaded):
        states.append({**model_state(linear), **OptimizerState(linear, optimizer_of(linear)).tensors()})
    dcp.save(states[0], checkpoint_id=folder)
    dcp.load(states[1], checkpoint_id=folder)
    tensors = {name: tensor for block in whole_tensors(loaded, set()) for name, tensor in block.items()}
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {name: tuple(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    return tensors, [parameter.to_local().detach() for parameter in loaded.parameters()], shapes


def test_uneven_shards_are_saved_loaded_and_gathered(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.call(2, save_load_and_gather, tmp_path / "checkpoint")
    whole, _, shapes = answers[0]
    assert torch.equal(whole["weight"], torch.arange(21.0).view(7, 3)) and torch.equal(whole["bias"], torch.arange(7.0))
    assert shapes["optimizer.weight.exp_avg"] == shapes["model.weight"] == (7, 3)
    for rank, (_, (weight, bias), _) in enumerate(answers):
        for local, tensor, name in ((weight, whole["weight"], "weight"), (bias, whole["bias"], "bias")):
            start, length = ROWS[name][rank]
            assert torch.equal(local, tensor.narrow(0, start, length))
