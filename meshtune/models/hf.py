"""Build a transformers model on meta and load a checkpoint straight into its shards.

The only file that calls transformers' private loading functions; tests/unit/test_models_contract.py pins what it needs.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import ContextManagers

from meshtune.errors import ModelError
from meshtune.models.source import Source


def build(source: Source, attention: str) -> PreTrainedModel:
    """The model of `source` on the meta device, in its master dtype, tied, in training mode. No weight is read.

    Raises ModelError if the architecture has no such attention implementation.
    """
    config = copy.deepcopy(source.config)
    config.dtype = source.master_dtype
    model_class = source.model_class
    try:
        config._attn_implementation = attention
        with ContextManagers(model_class.get_init_context(source.master_dtype, False, False, None)):
            model = model_class(config)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.attention: {model_class.__name__} cannot run {attention}: {error}") from error
    model.tie_weights()
    return model.train()


def load(model: PreTrainedModel, source: Source, device: torch.device) -> None:
    """Fill every parameter and buffer of a (sharded) meta model from the checkpoint; each rank reads only its slices.

    Raises ModelError naming every missing, unexpected or mismatched tensor.
    """
    model._is_distributed_loading_by_transformers = any(isinstance(p, DTensor) for p in model.parameters())
    quantizer, state_dict = _gguf(model, source) if source.gguf_file else (None, None)
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=source.name,
        ignore_mismatched_sizes=True,  # transformers' own error does not name them; ours does
        device_map={"": device},
        dtype=source.master_dtype,
        dtype_plan=model._get_dtype_plan(source.master_dtype),
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
    )
    files = None if state_dict is not None else source.files
    try:
        info, _ = type(model)._load_pretrained_model(model, state_dict, files, load_config)
        mismatched = sorted(info.mismatched_keys)
        info = type(model)._finalize_model_loading(model, load_config, info)
    except Exception as error:
        raise ModelError(f"model.name: {source.name} could not be loaded: {error}") from error
    _check_loaded(model, source, info, mismatched)
    finish(model, device)


def finish(model: PreTrainedModel, device: torch.device) -> None:
    """After every parameter has its values: tied weights are one parameter, and nothing is left on meta."""
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ModelError(f"no value was loaded for {_names(left)}")
    for target, origin in model.all_tied_weights_keys.items():
        if model.get_parameter(target) is not model.get_parameter(origin):
            raise ModelError(
                f"the config ties {target} to {origin}, but the checkpoint holds two different tensors for them; "
                "set tie_word_embeddings to false in its config.json to train them apart"
            )
    model.to(device)
    model.train()


def _check_loaded(model: PreTrainedModel, source: Source, info: object, mismatched: list) -> None:
    problems = []
    tied = set(model.all_tied_weights_keys)
    missing = sorted(set(info.missing_keys) - tied)
    if missing:
        problems.append(f"missing from the checkpoint: {_names(missing)}")
    allowed = [re.compile(pattern) for pattern in source.section.allow_unexpected]
    unexpected = sorted(k for k in info.unexpected_keys if not any(p.search(k) for p in allowed))
    if unexpected:
        problems.append(
            f"in the checkpoint but not in the model: {_names(unexpected)} (if they may be left out, name them in "
            "model.allow_unexpected)"
        )
    for name, *shapes in mismatched:
        problems.append(f"{name} has shape {tuple(shapes[0])} in the checkpoint and {tuple(shapes[1])} in the model")
    problems += [f"{name}: {text}" for name, text in (info.conversion_errors or {}).items()]
    problems += list(info.error_msgs or [])
    if problems:
        raise ModelError(f"model.name: {source.name} does not fit {type(model).__name__}:\n  " + "\n  ".join(problems))


def _gguf(model: PreTrainedModel, source: Source) -> tuple[HfQuantizer, dict[str, torch.Tensor]]:
    """The reader of GGUF files, told to dequantise, and the file's tensors."""
    from transformers.quantizers.auto import get_hf_quantizer
    from transformers.utils.quantization_config import GgufConfig

    settings = GgufConfig(gguf_file=source.gguf_file, dequantize=True)
    config = copy.deepcopy(model.config)
    try:
        reader, _, _ = get_hf_quantizer(config, settings, None, True, {}, gguf_file=source.gguf_file)
        reader.read_header(source.files[0])
        reader.update_dtype(source.master_dtype)
        reader.preprocess_model(
            model=model, dtype=source.master_dtype, device_map=None, checkpoint_files=source.files, use_kernels=False
        )
        return reader, reader.get_state_dict(source.files[0], model)
    except ImportError as error:
        raise ModelError(f"reading GGUF needs an extra: pip install 'meshtune[gguf]' ({error})") from error


def unit_names(model: PreTrainedModel) -> list[str]:
    """Qualified names of the repeated blocks (decoder layers), in the order in which they are defined."""
    blocks = set(model._no_split_modules or ())
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        children = list(module)
        if children and all(type(child).__name__ in blocks or _is_checkpointing_layer(child) for child in children):
            found += [f"{name}.{index}" for index in range(len(children))]
    return found


def _is_checkpointing_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _names(names: list[str], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
