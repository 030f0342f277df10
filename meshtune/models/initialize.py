"""Random initial weights that depend on the seed and on names, never on the layout.

Each block is initialised whole, on the CPU, by the model's own `_init_weights` under a seed of the block's own, and every
rank keeps its slice. At most one block is whole at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from meshtune.errors import ModelError
from meshtune.models.hf import finish, unit_names


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int | None, device: torch.device) -> None:
    """Give every parameter and buffer of a (sharded) meta model its initial value, for `seed` the same on any layout.

    With `seed` None, parameters are left as they come, for a checkpoint to fill; buffers have their values all the same.
    """
    for name, module, recurse in _blocks(model):
        sharded = _materialize(module, recurse)
        if seed is None:
            for _, _, _, whole in sharded:
                whole._is_hf_initialized = True
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(_seed_of(seed, name))
            _initialize_modules(model, module, recurse)
        _keep_own_slices(sharded, device)
    model.tie_weights()
    finish(model, device)


def _blocks(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whole subtree?): every decoder layer as a whole, then each remaining module alone, children first."""
    units = unit_names(model)
    for name in units:
        yield name, model.get_submodule(name), True
    rest = [
        (name, module)
        for name, module in model.named_modules()
        if not any(name == unit or name.startswith(f"{unit}.") for unit in units)
    ]
    for name, module in reversed(rest):
        yield name, module, False


def _materialize(module: nn.Module, recurse: bool) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
    """Put whole CPU parameters and buffers in place; returns (owner, name, sharded parameter, whole parameter)."""
    replaced = []
    for owner in module.modules() if recurse else [module]:
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                whole = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
                owner._parameters[name] = whole
                replaced.append((owner, name, parameter, whole))
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device="cpu")
    return replaced


def _initialize_modules(model: PreTrainedModel, module: nn.Module, recurse: bool) -> None:
    """Children before their parents, each by the nearest enclosing PreTrainedModel, as transformers itself does."""
    members = list(module.modules()) if recurse else [module]
    for member in reversed(members):
        owner = member if isinstance(member, PreTrainedModel) else model
        owner._initialize_weights(member, owner.is_custom_code())


def _keep_own_slices(replaced: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]], device: torch.device) -> None:
    for owner, name, parameter, whole in replaced:
        value: Tensor = _own_slice(whole.data, parameter).to(device, copy=True)
        if isinstance(parameter, DTensor):
            value = DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        new = nn.Parameter(value, parameter.requires_grad)
        new._is_hf_initialized = True  # a parent's own initialisation leaves it alone
        owner._parameters[name] = new


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
