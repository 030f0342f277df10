"""Initial values: of buffers always, of parameters where no checkpoint has them.

Random weights depend on the seed and on names, never on the layout: each block is initialised whole, on the CPU, by the model's
own `_init_weights` under a seed of the block's own, and every rank keeps its part. At most one block is whole at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from meshtune.errors import ModelError
from meshtune.layout.pieces import named_pieces, piece_of, whole_shape
from meshtune.layout.span import Absent
from meshtune.models.blocks import unit_names
from meshtune.models.constructed import Constructed
from meshtune.models.placing import has_value, local_of, own_slice, parameter_like, without_value
from meshtune.models.quantization.linear import QuantizedLinear
from meshtune.models.quantization.loading import held_names, put_quantised, quantised_layers

_CPU = torch.device("cpu")
_Members = list[tuple[str, nn.Module]]


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int | None, device: torch.device) -> None:
    """Give every parameter and buffer of a (sharded) meta model its initial value, for `seed` the same on any layout.

    With `seed` None, parameters have storage but no value, for a checkpoint to fill; buffers have theirs all the same.
    Raises ModelError naming a tensor for which the model's code has no initial value.
    """
    if seed is not None:
        _initialize(model, list(_blocks(model)), seed, device, parameters=True)
    else:
        initialize_buffers(model, device)
        for module in model.modules():
            for name, meta in _meta(module._parameters).items():
                module._parameters[name] = parameter_like(without_value(meta, device), meta)
    model.tie_weights()
    cast(nn.Module, model).to(device).train()


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give every buffer of a (sharded) meta model the value that follows from the config. Parameters stay on meta."""
    holders: list[tuple[str, _Members]] = [
        (path, [(path, module)]) for path, module in model.named_modules() if _meta(module._buffers)
    ]
    _initialize(model, holders, 0, device, parameters=False)


def _initialize(
    model: PreTrainedModel, blocks: list[tuple[str, _Members]], seed: int, device: torch.device, parameters: bool
) -> None:
    owners = _owners(model)
    constructed = Constructed(model, seed_of(seed, ""))
    for name, members in blocks:
        block: list[_Tensor | _QuantizedWeight] = []
        for path, module in members:
            if isinstance(module, QuantizedLinear):
                block.append(_QuantizedWeight(path, module))
            block += _materialize(path, module)
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(seed_of(seed, name))
            for path, module in reversed(members):  # children before their parents, as transformers itself does
                owners[path]._initialize_weights(module, owners[path].is_custom_code())
        for tensor in block:
            if isinstance(tensor, _Tensor) and tensor.is_parameter and not parameters:
                tensor.held[tensor.name] = tensor.meta
            else:
                tensor.fill_from(constructed)
                tensor.keep_own_part(device)


def _owners(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """For each module the innermost model that holds it, whose rules initialise it: a vision tower has its own."""
    owners: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        owners[path] = module if isinstance(module, PreTrainedModel) else owners[path.rpartition(".")[0]]
    return owners


def _blocks(model: PreTrainedModel) -> Iterator[tuple[str, _Members]]:
    """Names of blocks, and the modules of each, parents first. A block is a decoder layer, or another module that holds no
    layer, with all that it holds; or a module that holds layers, without them, after all of those."""
    units = unit_names(model)
    holders = {unit[:dot] for unit in units for dot, mark in enumerate(unit) if mark == "."} | {""}
    inner: dict[str, _Members] = {}
    for path, module in model.named_modules():
        if path not in holders and not isinstance(module, Absent):
            outermost = next(prefix for prefix in _prefixes(path) if prefix not in holders)
            inner.setdefault(outermost, []).append((path, module))
    yield from inner.items()
    for path, module in reversed([*model.named_modules()]):
        if path in holders:
            yield path, [(path, module)]


def _prefixes(path: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _meta(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_meta}


@dataclass(frozen=True)
class _Tensor:
    """A parameter or buffer of `owner`: its meta (and sharded) form, and the whole one that stands in its place for now."""

    path: str
    owner: nn.Module
    name: str
    meta: Tensor

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.meta, nn.Parameter)

    @property
    def held(self) -> dict[str, Any]:
        """The owner's tensors of its kind. An initialisation may put another one in the place of a buffer."""
        return self.owner._parameters if self.is_parameter else self.owner._buffers

    def fill_from(self, constructed: Constructed) -> None:
        """Some tensors have their initial value from the constructor alone, which on meta gave none."""
        current = self.held[self.name]
        if has_value(current):
            return
        value = constructed.value(self.path)
        if value is None:
            raise ModelError(f"model.weights: {type(constructed.model).__name__} gives {self.path} no initial value")
        current.copy_(value)

    def keep_own_part(self, device: torch.device) -> None:
        current = self.held[self.name]
        if self.is_parameter:
            piece = piece_of(self.owner, self.name)
            cut = piece is not None or isinstance(self.meta, DTensor)
            own = own_slice(current.data, self.meta, piece).to(device, copy=cut)
            self.held[self.name] = parameter_like(own, self.meta)
        else:
            self.held[self.name] = current.to(device)


class _QuantizedWeight:
    """The weight of a quantised layer: whole and float in its place for now, as the model's rules of initialisation know it."""

    def __init__(self, path: str, layer: QuantizedLinear):
        self.path, self.layer = path, layer
        self.meta = {name: layer._parameters.pop(name) for name in layer.codec.forms}
        shape = (layer.out_features, layer.in_features)
        whole = without_value(torch.empty(shape, dtype=layer.source_dtype, device="meta"), _CPU)
        layer._parameters["weight"] = nn.Parameter(whole, requires_grad=False)

    def fill_from(self, constructed: Constructed) -> None:
        _Tensor(self.path + ".weight", self.layer, "weight", self.layer.weight).fill_from(constructed)

    def keep_own_part(self, device: torch.device) -> None:
        whole = self.layer.weight.data
        self.layer._parameters.update(self.meta)
        put_quantised(self.layer, whole, device)


def _materialize(path: str, module: nn.Module) -> Iterator[_Tensor]:
    """Put whole CPU tensors without a value in the place of a module's own meta ones."""
    kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for held in kinds:
        for name, meta in _meta(held).items():
            shape = whole_shape(meta.shape, piece_of(module, name))
            whole = without_value(torch.empty(shape, dtype=meta.dtype, device="meta"), _CPU)
            held[name] = nn.Parameter(whole, meta.requires_grad) if isinstance(meta, nn.Parameter) else whole
            yield _Tensor(f"{path}.{name}" if path else name, module, name, meta)


@torch.no_grad()
def fill(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, named as in the model's state dict, into a (sharded) model; of a quantised layer the float weight.

    Raises ModelError by name.
    """
    pieces, layers = named_pieces(model), quantised_layers(model)
    held = held_names(layers, model)
    for name, tensor in model.state_dict().items():
        if name not in held:
            whole = _given(weights, name, whole_shape(tensor.shape, pieces.get(name)))
            local_of(tensor).copy_(own_slice(whole, tensor, pieces.get(name)))
    for path, layer in layers.items():
        whole = _given(weights, f"{path}.weight", (layer.out_features, layer.in_features))
        put_quantised(layer, whole, local_of(layer.weight).device)


def _given(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in weights or weights[name].shape != shape:
        found = tuple(weights[name].shape) if name in weights else "nothing"
        raise ModelError(f"{name} should have shape {shape}, but {found} was given")
    return weights[name]


def seed_of(seed: int, name: str) -> int:
    """A seed of its own for what is called `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
