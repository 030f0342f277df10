"""Initial values of an adapter: PEFT's own, by seed and name, or made from the model's weights; the same on every layout.

A tensor that is random is drawn whole, on the CPU, under a seed of its own name, and every rank keeps its part. What comes
from weights (magnitudes of DoRA, rows of tokens, copies of modules) comes from those of all ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.layout.pieces import aliases, named_pieces, piece_of, whole_shape
from meshtune.models.adapters.decomposition import decompose_weights, is_made_of_weights, keep_beginning
from meshtune.models.adapters.variant import NAME, lora_layers
from meshtune.models.adapters.view import adapter_of, inner_paths
from meshtune.models.gathering import Gathering
from meshtune.models.initialize import seed_of
from meshtune.models.placing import local_of, own_rectangles, parameter_like, set_whole, without_value
from meshtune.models.quantization.linear import QuantizedLinear

T = TypeVar("T")


@torch.no_grad()
def initialize_adapter(model: nn.Module, seed: int | None, device: torch.device) -> None:
    """Give what an adapter adds to a (sharded) `model`, whose own weights are loaded, its initial values.

    With `seed` None it has storage but no value, for a checkpoint to fill. Every rank calls it. Raises ModelError naming a
    tensor for which there is no rule.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return
    init = adapter.section.init_lora_weights or "default"
    if seed is None:
        _without_values(model, device)
        if is_made_of_weights(init):
            keep_beginning(model)
        return
    _bring_tied(model, device)
    _draw(model, seed, init, device)
    _measure_magnitudes(model, device)
    if is_made_of_weights(init):
        decompose_weights(model, init, seed, device)
        keep_beginning(model)
    _copy_modules(model)
    _copy_rows(model, device)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(f"peft: no initial value is known for {', '.join(left[:3])}")


def _without_values(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for leaf, meta in list(module._parameters.items()):
            if meta is not None and meta.is_meta:
                module._parameters[leaf] = parameter_like(without_value(meta, device), meta)


def _bring_tied(model: nn.Module, device: torch.device) -> None:
    """Of tied weights that other pipeline ranks hold, a rank has only storage until training begins: adapters beside them need
    the values."""
    wrapped = set(inner_paths(model).values())
    wanted = {name: first for name, first in aliases(model).items() if name.rpartition(".")[0] in wrapped}
    needed = sorted(set().union(*_of_all_ranks(set(wanted.values()))))
    if not needed:
        return
    held = {name: tensor for name, tensor in model.state_dict().items() if name in needed}
    gathering = Gathering(held, named_pieces(model))
    for first in needed:
        whole = gathering.everywhere(first)
        for name in [name for name, other in wanted.items() if other == first]:
            path, _, leaf = name.rpartition(".")
            set_whole(model.get_submodule(path), leaf, whole, device)


def _draw(model: nn.Module, seed: int, init: str, device: torch.device) -> None:
    """The two matrices of each layer, as PEFT draws them."""
    for path, layer in lora_layers(model):
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            held = getattr(layer, kind)
            if NAME not in held:
                continue
            owner, leaf = (held, NAME) if isinstance(held, nn.ParameterDict) else (held[NAME], "weight")
            whole = torch.empty(_whole_shape(owner, leaf))
            _fill(whole, kind, init, layer.r[NAME], torch.Generator().manual_seed(seed_of(seed, f"{path}.{kind}")))
            set_whole(owner, leaf, whole, device)


def _fill(whole: Tensor, kind: str, init: str, rank: int, random: torch.Generator) -> None:
    if kind == "lora_embedding_B":
        whole.normal_(generator=random)
    elif kind == "lora_A" and init == "gaussian":
        whole.normal_(0.0, 1 / rank, generator=random)
    elif kind == "lora_A":
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=random)
    else:
        whole.zero_()


def _measure_magnitudes(model: nn.Module, device: torch.device) -> None:
    """DoRA begins with the norms of the weights themselves, which the adapter does not change yet."""
    layers = {path: layer for path, layer in lora_layers(model) if NAME in layer.lora_magnitude_vector}
    quantised = {path: layer for path, layer in layers.items() if isinstance(layer.get_base_layer(), QuantizedLinear)}
    squares = summed({path: _own_squares(layer) for path, layer in layers.items() if path not in quantised})
    squares |= summed(_squares_of_quantised(quantised))
    for path, layer in layers.items():
        sums, seen = squares[path][:-1], squares[path][-1]
        whole = len(sums) * layer.in_features if path in quantised else math.prod(_whole_shape(layer.get_base_layer()))
        set_whole(layer.lora_magnitude_vector[NAME], "weight", (sums * (whole / seen)).sqrt(), device)


def _squares_of_quantised(layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """`_own_squares` of layers that are brought together one by one, since parts of what holds a weight need not be parts of it:
    the first rank that has one speaks for all."""
    bases = {path: layer.get_base_layer() for path, layer in layers.items()}
    held = {f"{path}.{name}": tensor for path, base in bases.items() for name, tensor in base.held.items()}
    pieces = {
        f"{path}.{name}": piece
        for path, base in bases.items()
        for name in base.held
        if (piece := piece_of(base, name)) is not None
    }
    gathering, found = Gathering(held, pieces), {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    for path in dict.fromkeys(name.rpartition(".")[0] for name in gathering.names):
        names = [name for name in gathering.names if name.rpartition(".")[0] == path]
        wholes = {name.rpartition(".")[2]: gathering.whole(name, gathering.holder(names[0])) for name in names}
        if rank == gathering.holder(names[0]):
            dense = bases[path].codec.dense({name: w for name, w in wholes.items() if w is not None}, torch.float32)
            found[path] = torch.cat(
                [dense.double().square().sum(1), torch.tensor([dense.numel()], dtype=torch.float64)]
            )
    return found


def _own_squares(layer: Any) -> Tensor:
    """[out + 1] float64: sums of squares for each output over what this rank holds of the weight, and how much that is."""
    base = layer.get_base_layer()
    outputs = 1 if layer.fan_in_fan_out or isinstance(base, nn.Embedding) else 0
    found = torch.zeros(_whole_shape(base)[outputs] + 1, dtype=torch.float64)
    for rectangle in own_rectangles(base.weight, piece_of(base, "weight")):
        part = rectangle.within(local_of(base.weight.detach()))
        start, length = rectangle.start[outputs], rectangle.shape[outputs]
        found[start : start + length] += part.cpu().double().square().sum(1 - outputs)
        found[-1] += part.numel()
    return found


def _whole_shape(owner: nn.Module, leaf: str = "weight") -> tuple[int, ...]:
    parameter = owner._parameters[leaf]
    assert parameter is not None
    return whole_shape(parameter.shape, piece_of(owner, leaf))


def _copy_modules(model: nn.Module) -> None:
    """A module that is trained whole begins as the one in whose place it stands, cut in the same way."""
    from peft.utils.other import ModulesToSaveWrapper

    for wrapper in [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]:
        for path, copy in wrapper.modules_to_save[NAME].named_modules():
            original = wrapper.original_module.get_submodule(path)
            for leaf, meta in list(copy._parameters.items()):
                if meta is not None and meta.is_meta:
                    own = local_of(original._parameters[leaf].detach())
                    copy._parameters[leaf] = parameter_like(own.to(meta.dtype, copy=True), meta)
            for leaf, buffer in original._buffers.items():
                copy._buffers[leaf] = None if buffer is None else buffer.clone()


def _copy_rows(model: nn.Module, device: torch.device) -> None:
    """Tokens whose rows are trained begin as they are."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, TrainableTokensLayer) and layer.trainable_tokens_delta[NAME].is_meta
    }
    rows = summed({path: _own_rows(layer) for path, layer in layers.items()})
    for path, layer in layers.items():
        found = rows[path][:, :-1] / rows[path][:, -1:]
        set_whole(layer.trainable_tokens_delta, NAME, found, device)


def _own_rows(layer: Any) -> Tensor:
    """[tokens, width + 1] float64: what this rank holds of the tokens' rows, zeros for what it does not, and which it holds."""
    base, wanted = layer.base_layer, torch.tensor(layer.token_indices[NAME])
    found = torch.zeros(len(wanted), _whole_shape(base)[1] + 1, dtype=torch.float64)
    for rectangle in own_rectangles(base.weight, piece_of(base, "weight")):
        part = rectangle.within(local_of(base.weight.detach()))
        place = wanted - rectangle.start[0]
        here = (place >= 0) & (place < len(part))
        found[here, :-1] += part[place[here].to(part.device)].cpu().double()
        found[here, -1] += 1
    return found


def summed(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum over all ranks of each named float64 tensor, of which a rank may have none. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(parts)
    tables = _of_all_ranks({name: part.shape for name, part in parts.items()})
    shapes = {name: shape for table in tables for name, shape in table.items()}
    if not shapes:
        return {}
    flat = torch.cat(
        [
            parts[name].flatten() if name in parts else torch.zeros(shape.numel(), dtype=torch.float64)
            for name, shape in shapes.items()
        ]
    )
    dist.all_reduce(flat)
    sizes = [shape.numel() for shape in shapes.values()]
    return {name: part.view(shapes[name]) for name, part in zip(shapes, flat.split(sizes), strict=True)}


def _of_all_ranks(own: T) -> list[T]:
    if not dist.is_initialized():
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
