"""A quantised layer gets its weight: a tensor at a time, whole, quantised, of which this rank keeps its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from meshtune.layout.pieces import piece_of
from meshtune.models.placing import own_slice, parameter_like
from meshtune.models.quantization.linear import Held, QuantizedLinear


def quantised_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Those of a model, by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def held_names(layers: Collection[str], model: nn.Module) -> set[str]:
    """Names of all tensors that hold the weights of such `layers`."""
    found = quantised_layers(model)
    return {f"{path}.{name}" for path in layers for name in found[path].codec.forms}


@torch.no_grad()
def put_quantised(layer: QuantizedLinear, whole: Tensor, device: torch.device) -> None:
    """Quantise the whole float weight [out, in] on `device`, from the dtype that the layer had it in, and give a (sharded) layer
    its part."""
    put_held(layer, layer.codec.quantise(whole.to(device, layer.source_dtype)), device)


@torch.no_grad()
def put_held(layer: QuantizedLinear, held: Held, device: torch.device) -> None:
    """Give a (sharded) layer its part of the tensors that hold the whole weight."""
    for name, tensor in held.items():
        meta = layer._parameters[name]
        assert meta is not None
        own = own_slice(tensor, meta, piece_of(layer, name)).to(device)
        if own.numel() < tensor.numel():
            own = own.clone()  # keeps nothing of the whole
        layer._parameters[name] = parameter_like(own, meta)


def dequantised_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of a model by name, with float32 weights [out, in] in the place of what holds quantised ones.

    `model` says which layers are quantised, and how; it may be sharded. Of each such layer all tensors are in `state`, or none.
    """
    found = dict(state)
    for path, layer in quantised_layers(model).items():
        if f"{path}.weight" in state:
            held = {name: found.pop(f"{path}.{name}") for name in layer.codec.forms}
            found[f"{path}.weight"] = layer.codec.dense(held, torch.float32)
    return found
