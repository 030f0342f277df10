"""Which layers are quantised: the dense ones of the repeated blocks, less those that must or shall stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtune.config.patterns import Patterns, covers, misspelt
from meshtune.errors import ModelError
from meshtune.models.adapters.view import inner_paths
from meshtune.models.blocks import generic, unit_names
from meshtune.models.quantization.ao import Integers
from meshtune.models.quantization.bnb import FourBit, Int8
from meshtune.models.quantization.linear import Codec, QuantizedLinear
from meshtune.models.quantization.qat import fake_quantise
from meshtune.models.quantization.section import QuantizationSection

_SHOWN = 4


@dataclass(frozen=True)
class Chosen:
    """What of a model is quantised, and how.

    Attributes:
        layers: paths of the layers, in the order of the model.
        kept: what else holds matrices in the repeated blocks, and why it stays as it is: reason -> {name: bytes}.
        lines: the same for people.
    """

    codec: Codec
    layers: tuple[str, ...]
    kept: Mapping[str, Mapping[str, int]]
    lines: tuple[str, ...]
    trained: QuantizationSection | None = None
    """Set where the layers are trained in float and only seen as if they were quantised."""


def codec_of(section: QuantizationSection) -> Codec:
    """The form that `quantization:` asks for. Raises ModelError if its library is not installed."""
    if find_spec(section.library) is None:
        raise ModelError(
            f"quantization.type: {section.type} needs {section.library}: pip install 'meshtune[{section.library}]'"
        )
    if section.type == "nf4" or section.type == "fp4":
        assert section.block is not None
        return FourBit(section.type, section.block, section.doubled)
    if section.library == "bitsandbytes":
        return Int8()
    return Integers(8 if section.type == "int8" else 4, section.block)


def choose(
    model: PreTrainedModel,
    section: QuantizationSection,
    trained: Patterns | None = None,
    read: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Chosen:
    """What of `model` (whole, on meta, without an adapter) is quantised.

    Args:
        trained: modules that are trained whole beside an adapter (`peft.modules_to_save`).
        read: layers whose weight the model's own code reads, their numbers written as `*` (see `watching.py`).
        only: of a checkpoint that is quantised already, the layers that are; all others stay.

    Raises ModelError for a pattern of `exclude_modules` that matches nothing, or if no layer is left.
    """
    codec = codec_of(section)
    _check_patterns(model, section.exclude_modules)
    layers: list[str] = []
    kept: dict[str, dict[str, int]] = {}
    for name, module in _holders(model):
        reason = _reason(model, name, module, codec, section, trained, read, only)
        if reason is None:
            layers.append(name)
        elif only is not None and name in only:
            raise ModelError(
                f"quantization: {name} is quantised in the checkpoint and cannot be read as it was ({reason})"
            )
        else:
            kept.setdefault(reason, {})[name] = _matrix_bytes(module)
    if outside := sorted(set(only or ()) - set(layers)):
        raise ModelError(
            f"quantization: {_names(outside)} of the checkpoint is quantised and stands outside the repeated blocks, where "
            "layers are not held in few bits; name the unquantised checkpoint"
        )
    if not layers:
        reasons = "; ".join(f"{_names(names)}: {reason}" for reason, names in kept.items())
        raise ModelError(
            f"quantization: no layer of {type(model).__name__} can be quantised ({reasons or 'it has none in repeated blocks'})"
        )
    lines = tuple(_lines(model, codec, section, layers, kept))
    return Chosen(codec, tuple(layers), kept, lines, section if section.qat else None)


def quantise(model: PreTrainedModel, chosen: Chosen) -> None:
    """Put a layer that holds its weight in few bits, or will (QAT), in the place of each that is chosen. On meta; nothing is
    read."""
    if chosen.trained is not None:
        fake_quantise(model, chosen.layers, chosen.trained)
        return
    inner = inner_paths(model)
    for path in chosen.layers:
        layer = model.get_submodule(inner.get(path, path))
        assert isinstance(layer, nn.Linear)
        model.set_submodule(inner.get(path, path), QuantizedLinear(layer, chosen.codec))


def _holders(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Modules in repeated blocks that hold a matrix themselves."""
    blocks = tuple(f"{unit}." for unit in unit_names(model))
    for name, module in model.named_modules():
        if name.startswith(blocks) and any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            yield name, module


def _reason(
    model: PreTrainedModel,
    name: str,
    module: nn.Module,
    codec: Codec,
    section: QuantizationSection,
    trained: Patterns | None,
    read: Collection[str],
    only: Collection[str] | None,
) -> str | None:
    """Why a module stays as it is, or None."""
    if type(module) is not nn.Linear:
        stacked = "expert" in name and any(p is not None and p.ndim > 2 for p in module._parameters.values())
        return "stacked experts are not linear layers" if stacked else f"{type(module).__name__} is no nn.Linear"
    if is_router(model, name, module):
        return "routers are not quantised"
    if section.exclude_modules is not None and covers(section.exclude_modules, name):
        return "quantization.exclude_modules"
    if trained is not None and covers(trained, name):
        return "peft.modules_to_save trains it"
    if generic(name) in read:
        return "the model's code reads its weight itself"
    if only is not None and name not in only:
        return "the checkpoint has it unquantised"
    if codec.block is not None and module.in_features % codec.block:
        return f"its width {module.in_features} is no multiple of block_size {codec.block}"
    return None


def is_router(model: nn.Module, name: str, module: nn.Linear) -> bool:
    """Whether a layer beside experts gives a number for each of them, or one for a shared one."""
    parent = model.get_submodule(name.rpartition(".")[0])
    experts = [child for key, child in parent.named_children() if "expert" in key and child is not module]
    stacked = {len(p) for child in experts for p in child.parameters(recurse=False) if p.ndim > 2}
    counts = {1, *stacked, *(len(child) for child in experts if isinstance(child, nn.ModuleList))}
    return bool(experts) and module.out_features in counts


def _check_patterns(model: PreTrainedModel, patterns: Patterns | None) -> None:
    if patterns is None:
        return
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if wrong := list(misspelt(patterns, names)):
        raise ModelError("\n".join(f"quantization.exclude_modules: {message}" for message in wrong))


def _matrix_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module._parameters.values() if p is not None and p.ndim > 1)


def _lines(
    model: PreTrainedModel,
    codec: Codec,
    section: QuantizationSection,
    layers: list[str],
    kept: Mapping[str, Mapping[str, int]],
) -> Iterator[str]:
    weights: Any = [model.get_submodule(name).weight for name in layers]
    count, before = sum(w.numel() for w in weights), sum(w.numel() * w.element_size() for w in weights)
    after = sum(
        torch.Size(form.shape(*w.shape)).numel() * form.dtype.itemsize for w in weights for form in codec.forms.values()
    )
    if section.qat:
        yield f"{len(layers)} layers train as if in {codec.name}, with int8 activations ({section.library}, QAT)"
    else:
        yield (
            f"{len(layers)} layers in {codec.name} ({section.library}): {_size(after)} in the place of {_size(before)}, "
            f"{8 * after / count:.3g} bits a weight"
        )
    inside = {
        id(p)
        for name in (*layers, *(n for names in kept.values() for n in names))
        for p in model.get_submodule(name).parameters()
    }
    outside = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside and p.ndim > 1)
    if outside:
        yield f"not quantised: {_size(outside)} of embeddings, head and other matrices outside the repeated blocks"
    for reason, names in kept.items():
        yield f"not quantised: {_names(names)} ({_size(sum(names.values()))}): {reason}"


def _names(names: Collection[str]) -> str:
    """`layers.*.mlp.gate (24 of them)`, kinds of layers in the order of the model."""
    kinds = Counter(map(generic, names))
    shown = [f"{kind}" + (f" ({count} of them)" if count > 1 else "") for kind, count in kinds.items()]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} kinds more" if len(shown) > _SHOWN else "")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
