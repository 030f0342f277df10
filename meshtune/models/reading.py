"""How each tensor of a checkpoint gets into a sharded model: in slices where a slice can be read, else whole and then cut.

transformers reads slices of tensors that are renamed or stacked (one expert's after the other's). Where a conversion joins,
splits or permutes along the sharded dimension, the same slices would be other rows, with the right shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig

from meshtune.layout.pieces import aliases, named_pieces
from meshtune.layout.wrapped import is_wrapped
from meshtune.models.blocks import unit_names
from meshtune.models.naming import Renaming
from meshtune.models.placing import local_of, own_box, own_rectangles, own_slice, parameter_like, without_value
from meshtune.models.quantization.loading import held_names, put_held, put_quantised, quantised_layers
from meshtune.models.quantization.stored import beside_weights, held_of

Stored = Mapping[str, Any]


@contextmanager
def stored_tensors(files: list[str], mapped: bool = True) -> Iterator[dict[str, Any]]:
    """Every tensor of safetensors files by name, read when it is indexed.

    Of a `mapped` file the pages stay with this process for as long as it is open; Windows commits memory for a whole one.
    """
    backend = "mmap" if mapped and sys.platform != "win32" else "pread"
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt", backend=backend)) for file in files]
        yield {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def read(
    model: PreTrainedModel,
    whole: PreTrainedModel,
    stored: Stored,
    load_config: Callable[[PreTrainedModel, torch.device], LoadStateDictConfig],
    device: torch.device,
) -> Any:
    """Fill the parameters and persistent buffers of a sharded meta `model`; `whole` is the same model, unsharded, on meta.

    Returns transformers' report, in which what could not be filled is missing.
    """
    wrapped = {name: meta for name, meta in model.named_parameters() if is_wrapped(meta)}
    sliced, cut, parts, quantised = _routes(model, whole, stored, load_config(model, device).weight_mapping or [])
    info, _ = convert_and_load_state_dict_in_model(
        model, {name: stored[name] for name in sliced}, load_config(model, device)
    )
    for name, meta in wrapped.items():  # transformers has set tensors of the usual class
        tensors, leaf = _place(model, name)
        if not tensors[leaf].is_meta:
            tensors[leaf] = parameter_like(local_of(tensors[leaf]), meta)
    for name, target in parts.items():
        _put(model, target, _own_part(stored[name], model, target, device))
        info.missing_keys.discard(target)
    layers = quantised_layers(model)
    packed = beside_weights(stored)
    for name, path in quantised.items():
        if name in packed:
            parts_of = {key: stored[part][...] for key, part in {"weight": name, **packed[name]}.items()}
            put_held(layers[path], held_of(layers[path], path, parts_of), device)
        else:
            put_quantised(layers[path], stored[name][:], device)
        info.missing_keys -= held_names([path], model)
    for names in cut:
        convert_and_load_state_dict_in_model(
            whole, {name: stored[name] for name in names}, load_config(whole, torch.device("cpu"))
        )
        info.missing_keys -= _take_over(model, whole, device)
    own = model.state_dict()
    for name in list(info.missing_keys):
        meta = own[name]
        if isinstance(meta, DTensor) and meta.is_meta and meta.to_local().numel() == 0:
            _put(model, name, without_value(meta, device))  # fewer rows than ranks: this one has none
            info.missing_keys.discard(name)
    for name in info.missing_keys & aliases(model).keys():
        _put(model, name, without_value(own[name], device))  # its value comes from the stage that has the original
        info.missing_keys.discard(name)
    return info


def _routes(
    model: PreTrainedModel, whole: PreTrainedModel, stored: Stored, conversions: list
) -> tuple[list[str], list[list[str]], dict[str, str], dict[str, str]]:
    """Names to read in slices, names to read whole (those of a block together), names of which a piece is read, each with the
    parameter that it is for, and names to read whole, one at a time, each with the quantised layer whose weight it is. What only
    other stages of a pipeline have is not read."""
    names, units, own, pieces = Renaming(whole, conversions), unit_names(whole), model.state_dict(), named_pieces(model)
    layers = {f"{path}.weight": path for path in quantised_layers(model)}
    elsewhere = whole.state_dict().keys() - own.keys()
    sliced: list[str] = []
    cut: dict[str, list[str]] = {}
    parts: dict[str, str] = {}
    quantised: dict[str, str] = {}
    beside = {part for parts_of in beside_weights(stored).values() for part in parts_of.values()}
    for name, tensor in stored.items():
        target, converter = names(name)
        meta = own.get(target)
        if target in elsewhere or name in beside:
            continue
        if target in layers and converter is None:
            quantised[name] = layers[target]
        elif target in layers or (layers and converter is not None and len(converter.target_patterns) > 1):
            cut.setdefault(_unit(target, units), []).append(name)
        elif target in pieces and converter is None:
            parts[name] = target
        elif target not in pieces and (converter is None or not isinstance(meta, DTensor)):
            sliced.append(name)
        elif (
            target not in pieces
            and isinstance(meta, DTensor)
            and _converts_slices(converter, meta, len(_shape(tensor)))
        ):
            if meta.to_local().numel():
                sliced.append(name)
        else:
            cut.setdefault(_unit(target, units), []).append(name)
    return sliced, list(cut.values()), parts, quantised


def _unit(name: str, units: list[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


def _own_part(stored: Any, model: PreTrainedModel, target: str, device: torch.device) -> Tensor:
    """This rank's part of a tensor, of which nothing else is read."""
    meta, piece = model.state_dict()[target], named_pieces(model)[target]
    local = torch.empty(own_box(meta)[1], dtype=meta.dtype, device=device)
    for rectangle in own_rectangles(meta, piece):
        box = tuple(
            slice(start, start + length) for start, length in zip(rectangle.start, rectangle.shape, strict=True)
        )
        rectangle.within(local).copy_(stored[box])
    return local


def _converts_slices(converter: WeightConverter | None, target: DTensor, source_dimensions: int) -> bool:
    """Whether the converter, given slices of its sources, makes this rank's slice of the target."""
    sharded = {p.dim % target.ndim for p in target.placements if isinstance(p, Shard)}
    assert converter is not None
    stack, *others = converter.operations
    if len(converter.target_patterns) > 1 or not isinstance(stack, MergeModulelist) or stack.dim != 0:
        return False
    if source_dimensions != target.ndim - 1:
        return False
    touched = {op.dim for op in others if isinstance(op, Concatenate)}
    touched |= {dim for op in others if isinstance(op, Transpose) for dim in (op.dim0, op.dim1)}
    known = all(isinstance(op, Concatenate | Transpose) for op in others)
    return known and sharded.isdisjoint(dim % target.ndim for dim in touched)


def _take_over(model: PreTrainedModel, whole: PreTrainedModel, device: torch.device) -> set[str]:
    """Give `model` its part of every tensor that `whole` holds for real, which goes back to meta. Returns names of what it has
    got."""
    pieces, layers = named_pieces(model), quantised_layers(model)
    taken = {name for name, tensor in whole.state_dict().items() if not tensor.is_meta}
    for name in list(taken):
        tensors, leaf = _place(whole, name)
        tensor = tensors[leaf].data
        path = name.removesuffix(".weight")
        if path != name and path in layers:
            put_quantised(layers[path], tensor, device)
            taken |= held_names([path], model)
        else:
            _put(model, name, own_slice(tensor, model.state_dict()[name], pieces.get(name)).to(device, copy=True))
        _put(whole, name, tensor.to("meta"))
    return taken


def _put(model: PreTrainedModel, name: str, local: Tensor) -> None:
    tensors, leaf = _place(model, name)
    tensors[leaf] = parameter_like(local, tensors[leaf]) if isinstance(tensors[leaf], nn.Parameter) else local


def _place(model: PreTrainedModel, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary, of parameters or of buffers, that holds a named tensor, and its key there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _shape(tensor: Any) -> list[int]:
    return list(tensor.shape) if isinstance(tensor, Tensor) else tensor.get_shape()
