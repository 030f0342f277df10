"""Build a transformers model on meta and load a checkpoint straight into its shards.

The only file that calls transformers' private loading functions; tests/unit/test_models_contract.py pins what it needs.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import ContextManagers

from meshtune.errors import ModelError
from meshtune.models.fitting import check_fits, names, refuse_misfits
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

    Raises ModelError naming every missing, unexpected or mismatched tensor, before any is read.
    """
    quantizer, state_dict = _gguf(model, source) if source.gguf_file else (None, None)
    if state_dict is None:
        whole = build(source, "eager")
        check_fits(whole, source, _load_config(whole, source, torch.device("meta")))
    tied = dict(model.all_tied_weights_keys)
    model._is_distributed_loading_by_transformers = any(isinstance(p, DTensor) for p in model.parameters())
    load_config = _load_config(model, source, device, quantizer)
    files = None if state_dict is not None else source.files
    try:
        info, _ = type(model)._load_pretrained_model(model, state_dict, files, load_config)
        info = type(model)._finalize_model_loading(model, load_config, info)
    except Exception as error:
        raise ModelError(f"model.name: {source.name} could not be loaded: {error}") from error
    refuse_misfits(model, source, info)
    _check_tied(tied, model)
    finish(model, device)


def _load_config(
    model: PreTrainedModel, source: Source, device: torch.device, quantizer: HfQuantizer | None = None
) -> LoadStateDictConfig:
    return LoadStateDictConfig(
        pretrained_model_name_or_path=source.name,
        ignore_mismatched_sizes=True,  # transformers' own error does not name them; ours does
        device_map={"": device},
        dtype=source.master_dtype,
        dtype_plan=model._get_dtype_plan(source.master_dtype),
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
    )


def _check_tied(declared: dict[str, str], model: PreTrainedModel) -> None:
    """transformers unties what a checkpoint holds as different tensors; then two weights would train where one was meant."""
    for target, origin in declared.items():
        if target not in model.all_tied_weights_keys or model.get_parameter(target) is not model.get_parameter(origin):
            raise ModelError(
                f"the config ties {target} to {origin}, but the checkpoint holds two different tensors for them; "
                "set tie_word_embeddings to false in its config.json to train them apart"
            )


def finish(model: PreTrainedModel, device: torch.device) -> None:
    """After every parameter has its values: nothing is left on meta, and the model is ready to train on `device`."""
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ModelError(f"no value was loaded for {names(left)}")
    model.to(device)
    model.train()


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
