"""Does a checkpoint fit its model? Found out from names and shapes alone, whole, before any weight is read or sharded.

On shards it could not be: a tensor with a row too many gives every rank the shape that it expects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from meshtune.errors import ModelError
from meshtune.models.headers import safetensors_header
from meshtune.models.naming import Renaming
from meshtune.models.quantization.stored import beside_weights
from meshtune.models.source import Source

_SHOWN = 20


def check_fits(model: PreTrainedModel, source: Source, load_config: LoadStateDictConfig) -> None:
    """Load the shapes of `source` into `model`, whole and on meta, by the conversions that the weights will go through.

    Raises ModelError naming every tensor that is missing, unexpected or of another shape.
    """
    shapes = {
        name: torch.empty(entry["shape"], device="meta")
        for file in source.files
        for name, entry in safetensors_header(Path(file)).items()
    }
    _unpack(shapes, model, load_config)
    info, _ = convert_and_load_state_dict_in_model(model, shapes, load_config)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    refuse_misfits(model, source, info)


def _unpack(shapes: dict[str, torch.Tensor], model: PreTrainedModel, load_config: LoadStateDictConfig) -> None:
    """Weights that the checkpoint holds quantised have the shapes that they have in the model: reading them says if they fit."""
    own = model.state_dict()
    beside = beside_weights(shapes)
    for name, target in _quantised(beside, model, load_config.weight_mapping or []).items():
        shapes[name] = torch.empty(own[target].shape, device="meta")
        for part in beside[name].values():
            del shapes[part]


def quantised_in_checkpoint(source: Source, model: PreTrainedModel, block: int | None = None) -> frozenset[str]:
    """Paths of the layers of `model` whose weights the checkpoint of `source` holds quantised.

    Raises ModelError if so many weights as `block` do not share a scale there.
    """
    files = (file for file in source.files if file.endswith(".safetensors"))
    stored = {name: entry for file in files for name, entry in safetensors_header(Path(file)).items()}
    beside, own = beside_weights(stored), model.state_dict()
    found = _quantised(beside, model, get_model_conversion_mapping(model))
    for name, target in found.items():
        scales = math.prod(stored[beside[name]["absmax"]]["shape"]) if "absmax" in beside[name] else 0
        if block and scales and (there := own[target].numel() // scales) != block:
            raise ModelError(
                f"quantization.block_size: {source.name} has a scale for {there} weights ({name}), not for {block}; write {there}"
            )
    return frozenset(target.removesuffix(".weight") for target in found.values())


def _quantised(stored: Iterable[str], model: PreTrainedModel, conversions: list) -> dict[str, str]:
    """The name of each of these quantised weights in the model. Raises ModelError for one that the model has not, or is made into
    another on the way."""
    names = list(stored)
    follow, own = Renaming(model, conversions), model.state_dict()
    found = {}
    for name in names:
        target, converter = follow(name)
        if target not in own or converter is not None:
            raise ModelError(f"model.name: {name} is quantised, and is no weight of {type(model).__name__} as it is")
        found[name] = target
    return found


def refuse_misfits(model: PreTrainedModel, source: Source, info: Any) -> None:
    """Raises ModelError naming every tensor that transformers' loading report `info` calls missing, unexpected or mismatched."""
    problems = _misfits(model, source, info)
    if problems:
        raise ModelError(f"model.name: {source.name} does not fit {type(model).__name__}:\n  " + "\n  ".join(problems))


def _misfits(model: PreTrainedModel, source: Source, info: Any) -> list[str]:
    problems = []
    broken = {name: _last_line(text) for name, text in info.conversion_errors.items()}
    missing = sorted(set(info.missing_keys) - set(model.all_tied_weights_keys) - set(broken))
    if missing:
        problems.append(f"missing from the checkpoint: {names(missing)}")
    allowed = [re.compile(pattern) for pattern in source.section.allow_unexpected]
    unexpected = sorted(name for name in info.unexpected_keys if not any(p.search(name) for p in allowed))
    if unexpected:
        problems.append(
            f"in the checkpoint but not in the model: {names(unexpected)} (if they may be left out, name them in "
            "model.allow_unexpected)"
        )
    for name, found, wanted in sorted(info.mismatched_keys):
        problems.append(f"{name} has shape {tuple(found)} in the checkpoint and {tuple(wanted)} in the model")
    return problems + [
        f"{name} cannot be made from the checkpoint's tensors: {text}" for name, text in sorted(broken.items())
    ]


def names(found: list[str]) -> str:
    """A list of tensors in one line, cut to a readable length."""
    shown = ", ".join(found[:_SHOWN])
    return shown if len(found) <= _SHOWN else f"{shown} and {len(found) - _SHOWN} more"


def _last_line(text: str) -> str:
    """transformers gives a traceback, then what was wrong."""
    return text.strip().splitlines()[-1].removeprefix("Error: ")
