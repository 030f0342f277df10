"""Adapters that begin as the larger part of the weights themselves: PiSSA (Meng et al. 2024) and OLoRA (Buyukakyuz 2024).

The frozen weight is then the rest, W - scaling * B A, with A and B as they begin. These two are kept, and stored in every
checkpoint: the rest follows from them and the model's own weights, to the bit, when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.layout.pieces import piece_of, set_piece
from meshtune.models.adapters.variant import NAME, lora_layers
from meshtune.models.gathering import Gathering
from meshtune.models.initialize import seed_of
from meshtune.models.placing import local_of, own_slice, set_whole

BEGINNING = "initial"
"""Name of the buffer, beside the weight of A and of B, that holds how it began."""


def is_made_of_weights(init: str) -> bool:
    """Whether this `peft.init_lora_weights` takes its values from the model's weights."""
    return init.startswith(("pissa", "olora"))


def check_beginning(model: nn.Module, init: str) -> None:
    """Raises ModelError naming a layer of `model`, on meta and with its adapter, that cannot begin so."""
    if not is_made_of_weights(init):
        return
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(path.replace(".base_layer", ""))
    for path, layer in lora_layers(model):
        if hasattr(layer, "parameter_name"):
            raise ModelError(
                f"peft.init_lora_weights: {init} is for layers, and {path}.{layer.parameter_name} is a stack of experts' "
                "weights; write `default`, or leave peft.target_parameters out"
            )
        if not _has_matrices(layer):
            continue
        weight = layer.get_base_layer().weight
        if layer.r[NAME] > min(weight.shape):
            raise ModelError(
                f"peft.r: {layer.r[NAME]} is more than {path} has ({tuple(weight.shape)}), which {init} takes its values from; "
                f"write at most {min(weight.shape)}, or another rank for it in peft.rank_pattern"
            )
        if len(shared := owners[id(weight)]) > 1:
            raise ModelError(
                f"peft.init_lora_weights: {init} would change the weight of {path}, which {' and '.join(sorted(shared))} share; "
                "write `default`, or leave that layer out"
            )


@torch.no_grad()
def decompose_weights(model: nn.Module, init: str, seed: int, device: torch.device) -> None:
    """Give A and B of every layer the values that `init` says. Every rank calls it.

    Layers are shared out: each rank brings together and decomposes the whole weight of one at a time.
    """
    layers = _layers(model)
    gathering = Gathering(*_weights(layers))
    facts = _facts_of_all(layers)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for start in range(0, len(gathering.names), world):
        group = gathering.names[start : start + world]
        wholes = {path: gathering.whole(path, owner) for owner, path in enumerate(group)}
        made = {
            path: decompose(facts[path].as_matrix(whole.to(device)), init, facts[path], seed_of(seed, path))
            for path, whole in wholes.items()
            if whole is not None
        }
        for owner, path in enumerate(group):
            for kind, values in zip(
                ("lora_A", "lora_B"), _told(made.get(path), facts[path], owner, rank, world), strict=True
            ):
                if path in layers:
                    set_whole(getattr(layers[path], kind)[NAME], "weight", values, device)


@torch.no_grad()
def keep_beginning(model: nn.Module) -> None:
    """Keep how A and B are now, where decomposed: in a buffer beside each."""
    for layer in _layers(model).values():
        for matrix in (layer.lora_A[NAME], layer.lora_B[NAME]):
            matrix.register_buffer(BEGINNING, matrix.weight.detach().clone())
            piece = piece_of(matrix, "weight")
            if piece is not None:
                set_piece(matrix, BEGINNING, piece)


@torch.no_grad()
def take_from_weights(model: nn.Module) -> None:
    """Leave the rest in the place of the frozen weights of every layer that has kept how it began. Every rank calls it, once,
    when both are there."""
    layers = {path: layer for path, layer in _layers(model).items() if BEGINNING in layer.lora_A[NAME]._buffers}
    kept = {
        f"{path}.{kind}": getattr(layer, kind)[NAME] for path, layer in layers.items() for kind in ("lora_A", "lora_B")
    }
    pieces = {name: piece for name, matrix in kept.items() if (piece := piece_of(matrix, BEGINNING)) is not None}
    gathering = Gathering({name: matrix.get_buffer(BEGINNING) for name, matrix in kept.items()}, pieces)
    for path in dict.fromkeys(name.rpartition(".")[0] for name in gathering.names):
        first, second = (gathering.everywhere(f"{path}.{kind}").float() for kind in ("lora_A", "lora_B"))
        if path in layers:
            base, change = layers[path].get_base_layer(), second @ first
            change = (change.T if layers[path].fan_in_fan_out else change) * layers[path].scaling[NAME]
            local = local_of(base.weight.data)
            own = own_slice(change, base.weight, piece_of(base, "weight")).to(local.device)
            local.copy_((local.float() - own).to(local.dtype))


def decompose(weight: Tensor, init: str, facts: _Facts, seed: int) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r], float32 on the CPU, of a float32 matrix [out, in], as PEFT has them."""
    rank = facts.rank
    if init == "olora":
        orthogonal, upper = torch.linalg.qr(weight)
        return upper[:rank].cpu(), orthogonal[:, :rank].cpu()
    if init == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[] if weight.device.type == "cpu" else None):
            torch.manual_seed(seed)
            left, values, columns = torch.svd_lowrank(weight, rank, niter=int(init.rpartition("_")[2]))
        right = columns.T
    roots = (values[:rank] / facts.scaling).sqrt()
    return (roots[:, None] * right[:rank]).cpu(), (left[:, :rank] * roots).cpu()


@dataclass(frozen=True)
class _Facts:
    """Of a layer, also for ranks that are without it."""

    rank: int
    scaling: float
    inputs: int
    outputs: int
    transposed: bool

    def as_matrix(self, weight: Tensor) -> Tensor:
        """[out, in] float32."""
        return (weight.T if self.transposed else weight).float()


def _has_matrices(layer: Any) -> bool:
    return NAME in layer.lora_A and not hasattr(layer, "parameter_name")


def _layers(model: nn.Module) -> dict[str, Any]:
    return {path: layer for path, layer in lora_layers(model) if _has_matrices(layer)}


def _weights(layers: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of layers by the layers' paths, and which parts of them they are."""
    bases = {path: layer.get_base_layer() for path, layer in layers.items()}
    pieces = {path: piece for path, base in bases.items() if (piece := piece_of(base, "weight")) is not None}
    return {path: base.weight for path, base in bases.items()}, pieces


def _facts_of_all(layers: Mapping[str, Any]) -> dict[str, _Facts]:
    own = {
        path: _Facts(layer.r[NAME], layer.scaling[NAME], layer.in_features, layer.out_features, layer.fan_in_fan_out)
        for path, layer in layers.items()
    }
    if not dist.is_initialized():
        return own
    tables: list[dict[str, _Facts]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(tables, own)
    return {path: facts for table in tables for path, facts in table.items()}


def _told(
    made: tuple[Tensor, Tensor] | None, facts: _Facts, owner: int, rank: int, world: int
) -> tuple[Tensor, Tensor]:
    """A and B, from the rank that has made them."""
    if made is None:
        made = torch.empty(facts.rank, facts.inputs), torch.empty(facts.outputs, facts.rank)
    first, second = (matrix.contiguous() for matrix in made)
    if world > 1:
        dist.broadcast(first, src=owner)
        dist.broadcast(second, src=owner)
    return first, second
