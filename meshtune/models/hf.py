"""Build a transformers model on meta and load a checkpoint straight into its shards.

Loading, with fitting.py, reading.py and naming.py, calls private functions of transformers, and no other room does;
tests/unit/test_models_contract.py pins what they need.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import ContextManagers

from meshtune.errors import ModelError
from meshtune.models.bars import bars
from meshtune.models.blocks import remember_units, unit_names
from meshtune.models.fitting import check_fits, names, refuse_misfits
from meshtune.models.initialize import initialize_buffers
from meshtune.models.quantization.loading import quantised_layers
from meshtune.models.reading import read, stored_tensors
from meshtune.models.source import Source

__all__ = ["build", "load", "unit_names"]


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
    remember_units(model)
    return model.train()


def load(model: PreTrainedModel, source: Source, device: torch.device) -> None:
    """Fill every parameter and buffer of a (sharded) meta model from the checkpoint; each rank reads only its slices.

    Raises ModelError naming every missing, unexpected or mismatched tensor, before any is read.
    """
    whole = build(source, "eager")
    quantizer, tensors = _gguf(whole, source) if source.gguf_file else (None, None)

    def config(of: PreTrainedModel, on: torch.device) -> LoadStateDictConfig:
        return _load_config(of, source, on, quantizer)

    if tensors is None:
        with bars(0):
            check_fits(whole, source, config(whole, torch.device("meta")))
    tied = dict(model.all_tied_weights_keys)
    initialize_buffers(model, device)
    try:
        with bars(1), nullcontext(tensors) if tensors is not None else _stored(model, source) as stored:
            info = read(model, whole, stored, config, device)
    except Exception as error:
        raise ModelError(f"model.name: {source.name} could not be loaded: {error}") from error
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    refuse_misfits(model, source, info)
    _check_tied(tied, model)
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if left:
        raise ModelError(f"no value was loaded for {names(left)}")
    cast(nn.Module, model).to(device).train()


def _stored(model: PreTrainedModel, source: Source) -> AbstractContextManager[dict[str, Any]]:
    """The checkpoint's tensors. What is quantised is read, and let go: mapped, all of it would stay in memory beside the rest."""
    return stored_tensors(source.files, mapped=not quantised_layers(model))


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
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),  # type: ignore[arg-type]
    )


def _check_tied(declared: dict[str, str], model: PreTrainedModel) -> None:
    """transformers unties what a checkpoint holds as different tensors; then two weights would train where one was meant."""
    for target, origin in declared.items():
        if target not in model.all_tied_weights_keys or model.get_parameter(target) is not model.get_parameter(origin):
            raise ModelError(
                f"the config ties {target} to {origin}, but the checkpoint holds two different tensors for them; "
                "set tie_word_embeddings to false in its config.json to train them apart"
            )


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
