"""Random initial weights that depend on the seed and on names, never on the layout.

Each block is initialised whole, on the CPU, by the model's own `_init_weights` under a seed of the block's own, and every
rank keeps its slice. At most one block is whole at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from meshtune.errors import ModelError
from meshtune.models.constructed import Constructed
from meshtune.models.hf import finish, unit_names


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int | None, device: torch.device) -> None:
    """Give every parameter and buffer of a (sharded) meta model its initial value, for `seed` the same on any layout.

    With `seed` None, parameters are left without one, for a checkpoint to fill; buffers have their values all the same.
    Raises ModelError naming a tensor for which the model's code has no initial value.
    """
    owners = _owners(model)
    constructed = Constructed(model, _seed_of(seed, ""))
    for name, members in _blocks(model):
        block = [tensor for path, module in members for tensor in _materialize(path, module)]
        if seed is None:
            for tensor in block:
                tensor.whole._is_hf_initialized = tensor.is_parameter
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(_seed_of(seed, name))
            for path, module in reversed(members):  # children before their parents, as transformers itself does
                owners[path]._initialize_weights(module, owners[path].is_custom_code())
        for tensor in block:
            if not (seed is None and tensor.is_parameter):
                tensor.fill_from(constructed)
            tensor.keep_own_slice(device)
    model.tie_weights()
    finish(model, device)


def _owners(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """For each module the innermost model that holds it, whose rules initialise it: a vision tower has its own."""
    owners: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        owners[path] = module if isinstance(module, PreTrainedModel) else owners[path.rpartition(".")[0]]
    return owners


def _blocks(model: PreTrainedModel) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Names of blocks, and the modules of each, parents first. A block is a decoder layer, or another module that holds no
    layer, with all that it holds; or a module that holds layers, without them, after all of those."""
    units = unit_names(model)
    holders = {unit[:dot] for unit in units for dot, mark in enumerate(unit) if mark == "."} | {""}
    inner: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if path not in holders:
            outermost = next((p for p in _prefixes(path) if p not in holders), path)
            inner.setdefault(outermost, []).append((path, module))
    yield from inner.items()
    for path, module in reversed([*model.named_modules()]):
        if path in holders:
            yield path, [(path, module)]


def _prefixes(path: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


@dataclass(frozen=True)
class _Tensor:
    """A parameter or buffer of `owner`: its meta (and sharded) form, and the whole one that stands in its place for now."""

    path: str
    owner: nn.Module
    name: str
    meta: Tensor
    whole: Tensor

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.meta, nn.Parameter)

    def fill_from(self, constructed: Constructed) -> None:
        """Some tensors have their initial value from the constructor alone, which on meta gave none."""
        current = self.whole if self.is_parameter else self.owner._buffers[self.name]
        if _has_value(current):
            return
        value = constructed.value(self.path)
        if value is None:
            raise ModelError(f"model.weights: {type(constructed.model).__name__} gives {self.path} no initial value")
        current.copy_(value)

    def keep_own_slice(self, device: torch.device) -> None:
        if not self.is_parameter:
            return
        value: Tensor = _own_slice(self.whole.data, self.meta).to(device, copy=isinstance(self.meta, DTensor))
        if isinstance(self.meta, DTensor):
            layout: dict[str, Any] = {"shape": self.meta.shape, "stride": self.meta.stride(), "run_check": False}
            value = DTensor.from_local(value, self.meta.device_mesh, self.meta.placements, **layout)
        kept = nn.Parameter(value, self.meta.requires_grad)
        kept._is_hf_initialized = True  # the initialisation of what holds this block leaves it alone
        self.owner._parameters[self.name] = kept


def _materialize(path: str, module: nn.Module) -> Iterator[_Tensor]:
    """Put CPU tensors without a value in the place of a module's own meta ones."""
    for tensors in (module._parameters, module._buffers):
        for name, meta in tensors.items():
            if meta is None or not meta.is_meta:
                continue
            whole = _without_value(meta)
            tensors[name] = nn.Parameter(whole, meta.requires_grad) if isinstance(meta, nn.Parameter) else whole
            yield _Tensor(f"{path}.{name}" if path else name, module, name, meta, tensors[name])


def _without_value(like: Tensor) -> Tensor:
    """A tensor in which it shows if nothing is written to it."""
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, torch.nan, dtype=like.dtype)
    lowest = False if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, lowest, dtype=like.dtype)


def _has_value(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(torch.isnan(tensor).any())
    return tensor.dtype in (torch.bool, torch.uint8) or not bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _own_slice(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole` if it is laid out as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole.contiguous()


@torch.no_grad()
def fill(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, named as in the model's state dict, into a (sharded) model. Raises ModelError by name."""
    for name, tensor in model.state_dict().items():
        if name not in weights or weights[name].shape != tensor.shape:
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise ModelError(f"{name} should have shape {tuple(tensor.shape)}, but {found} was given")
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(_own_slice(weights[name], tensor))


def _seed_of(seed: int | None, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
