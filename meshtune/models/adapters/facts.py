"""What the classes of a model's layers do not say, found out before any weight is read: which of them are called, which compute
a matrix product, and which PEFT would take for others."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.models.adapters.targets import Facts, is_layer
from meshtune.models.blocks import generic
from meshtune.models.shrink import Degrees
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, miniature_config, row_of_tokens

_TOKENS = 11
_TOLERANCE = 1e-4
_known: dict[tuple[object, ...], frozenset[str]] = {}


def facts_of(source: Source, model: PreTrainedModel) -> Facts:
    """Of `model`, the bare model of `source` on meta."""
    key = (source.model_class, source.config.to_json_string(use_diff=False))
    if key not in _known:
        _known[key] = _unused(source)
    layers = {path: module for path, module in model.named_modules() if path and is_layer(module)}
    return Facts(
        _known[key],
        frozenset(_nonlinear(layers)),
        frozenset(_rewritten(model, layers)),
        frozenset(_refused(model, layers)),
    )


@torch.no_grad()
def _unused(source: Source) -> frozenset[str]:
    """Layers of a small twin, their numbers written as `*`, that none of its forwards calls."""
    twin = build_twin(source, miniature_config(source, Degrees(experts=2)), "eager", torch.device("cpu"))
    called: set[str] = set()
    layers = {generic(path) for path, module in twin.named_modules() if path and is_layer(module)}
    for path, module in twin.named_modules():
        module.register_forward_pre_hook(lambda _module, _args, path=path: called.add(generic(path)))
    twin(input_ids=row_of_tokens(twin, _TOKENS)[None], use_cache=False)
    return frozenset(layers - called)


@torch.no_grad()
def _nonlinear(layers: dict[str, nn.Module]) -> Iterator[str]:
    """Of layers with a forward of their own, one of each class and size is run beside the plain matrix product."""
    known: dict[tuple[object, ...], bool] = {}
    for path, module in layers.items():
        if type(module).forward in (nn.Linear.forward, nn.Embedding.forward, Conv1D.forward):
            continue
        if isinstance(module, nn.Embedding):
            continue  # a scale of its own, which PEFT asks for, is all that embeddings have
        key = (type(module), *(tuple(p.shape) for p in module.parameters()))
        if key not in known:
            known[key] = _is_product(module)
        if not known[key]:
            yield path


def _is_product(module: nn.Module) -> bool:
    one = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for parameter in one.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    weight = one.weight.T if isinstance(one, Conv1D) else one.weight
    assert isinstance(weight, torch.Tensor)
    rows = torch.randn((1, 2, weight.shape[1]), generator=generator)
    wanted = functional.linear(rows, weight, one.bias)  # type: ignore[arg-type]
    try:
        found = one(rows)
    except Exception:  # whatever its code raises: it is not called as a linear layer is
        return False
    same = isinstance(found, torch.Tensor) and found.shape == wanted.shape
    return same and bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _rewritten(model: PreTrainedModel, layers: dict[str, nn.Module]) -> Iterator[str]:
    """PEFT reads some names of layers as they were in older versions of transformers, and puts experts in their place."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def survives(names: set[str]) -> bool:
        config = LoraConfig(target_modules=list(names))
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of two that it would join
            return False
        return set(config.target_modules or ()) == names

    if not survives(set(layers)):
        yield from (path for path in layers if not survives({path}))


def _refused(model: PreTrainedModel, layers: dict[str, nn.Module]) -> Iterator[str]:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    config, known = LoraConfig(), dict[str, bool]()
    for path in layers:
        name = path.rpartition(".")[2]
        if name not in known:
            try:
                _check_lora_target_modules_mamba(config, model, name)
                known[name] = False
            except ValueError:
                known[name] = True
        if known[name]:
            yield path
