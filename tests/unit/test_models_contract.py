"""Every private name and undocumented behaviour of transformers, torch and huggingface_hub that meshtune.models stands on.

When an upgrade breaks one, it fails here, by name, before it fails anywhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import ContextManagers

from tests.unit.models_tiny import tiny_config, tiny_model

META = torch.device("meta")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _on_meta(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model_class = type(tiny_model(name))
    with ContextManagers(model_class.get_init_context(dtype, False, False, None)):
        model = model_class(tiny_config(name))
    model.tie_weights()
    return model


def test_the_version_is_one_that_was_tried() -> None:
    assert transformers.__version__.startswith("5.24.")


def test_init_context_builds_on_meta_in_the_dtype() -> None:
    assert _parameters(PreTrainedModel.get_init_context) == [
        "dtype",
        "is_quantized",
        "_is_ds_init_called",
        "allow_all_kernels",
    ]
    model = _on_meta("llama-tied", torch.bfloat16)
    assert {(p.is_meta, p.dtype) for p in model.parameters()} == {(True, torch.bfloat16)}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_map_a_target_to_its_origin_even_if_untied_models_declare_them() -> None:
    assert tiny_model("llama-tied").all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tiny_model("llama").all_tied_weights_keys == {}
    assert _parameters(PreTrainedModel.tie_weights) == ["self", "missing_keys", "recompute_mapping"]


def test_the_settings_of_loading() -> None:
    wanted = {
        "pretrained_model_name_or_path",
        "ignore_mismatched_sizes",
        "device_map",
        "dtype",
        "dtype_plan",
        "hf_quantizer",
    }
    assert wanted | {"weight_mapping"} <= {field.name for field in dataclasses.fields(LoadStateDictConfig)}
    loading = _parameters(PreTrainedModel._load_pretrained_model)
    assert loading[:4] == ["model", "state_dict", "checkpoint_files", "load_config"]
    assert _parameters(PreTrainedModel._finalize_model_loading) == ["model", "load_config", "loading_info"]
    assert _parameters(PreTrainedModel._get_dtype_plan) == ["self", "dtype"]
    assert PreTrainedModel._is_distributed_loading_by_transformers is False


def test_shapes_load_on_meta_and_the_report_names_what_does_not_fit() -> None:
    model = _on_meta("mixtral")
    shapes = {name: torch.empty_like(tensor) for name, tensor in _as_stored(model).items()}
    shapes["other.weight"] = torch.empty(2, device=META)
    shapes["lm_head.weight"] = torch.empty(3, 48, device=META)
    del shapes["model.norm.weight"]
    info, _ = type(model)._load_pretrained_model(model, shapes, None, _load_config(model))
    assert info.missing_keys == {"model.norm.weight"} and info.unexpected_keys == {"other.weight"}
    assert info.mismatched_keys == {("lm_head.weight", torch.Size([3, 48]), torch.Size([97, 48]))}
    assert info.conversion_errors == {} and info.error_msgs == []
    model._adjust_missing_and_unexpected_keys(info)
    assert info.unexpected_keys == {"other.weight"}


def test_an_expert_that_is_absent_is_a_conversion_error() -> None:
    model = _on_meta("mixtral")
    shapes = {
        n: torch.empty_like(t) for n, t in _as_stored(model).items() if "layers.1" not in n or "experts.2.w1" not in n
    }
    info, _ = type(model)._load_pretrained_model(model, shapes, None, _load_config(model))
    assert list(info.conversion_errors) == ["model.layers.1.mlp.experts.gate_up_proj"]
    assert isinstance(info.conversion_errors["model.layers.1.mlp.experts.gate_up_proj"], str)


def _load_config(model: PreTrainedModel) -> LoadStateDictConfig:
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, None, None)
    return LoadStateDictConfig(
        ignore_mismatched_sizes=True, device_map={"": META}, dtype=torch.float32, weight_mapping=mapping
    )


def _as_stored(model: PreTrainedModel) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict())


def test_conversions_are_reverted_by_those_that_the_model_remembers() -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta("mixtral")
    fused = {"model.layers.0.mlp.experts.down_proj": torch.arange(8.0).view(4, 2, 1)}
    apart = revert_weight_conversion(model, fused)
    assert list(apart) == [f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight" for i in range(4)]
    assert torch.equal(torch.stack(list(apart.values())), fused["model.layers.0.mlp.experts.down_proj"])
    model._weight_conversions = []
    assert list(revert_weight_conversion(model, fused)) == list(fused)


def test_a_stored_name_is_renamed_as_loading_does_and_conversions_know_if_they_were_used() -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model = _on_meta("gpt2")
    own = model.state_dict()
    assert rename_source_key("h.0.ln_1.weight", [], [], "transformer", own) == ("transformer.h.0.ln_1.weight", None)
    conversions = get_model_conversion_mapping(_on_meta("mixtral"))
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    assert not any(c.was_used() for c in conversions)
    name, pattern = rename_source_key(
        "model.layers.1.block_sparse_moe.experts.0.w2.weight", renamings, converters, "model", {}
    )
    assert name == "model.layers.1.mlp.experts.down_proj" and pattern is not None
    assert any(c.was_used() for c in conversions)


def test_attention_is_dispatched_by_name_for_models_that_never_heard_of_it() -> None:
    calls = []

    def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
        calls.append((query.shape, key.shape, mask, settings))
        return value.repeat_interleave(2, 1).transpose(1, 2), None

    AttentionInterface.register("watched", watched)
    AttentionMaskInterface.register("watched", lambda *_args, **_settings: None)
    model = tiny_model("qwen2-window", "watched")
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    query, key, mask, settings = calls[0]
    assert (query, key, mask) == ((1, 4, 3, 12), (1, 2, 3, 12), None)
    assert settings["sliding_window"] == 6 and settings["scaling"] == 12**-0.5 and calls[1][3]["sliding_window"] is None


def test_a_model_declares_what_it_supports() -> None:
    model_class = type(tiny_model("llama"))
    assert model_class._supports_sdpa and not type(tiny_model("gemma2"))._supports_sdpa
    assert model_class._no_split_modules == {"LlamaDecoderLayer"} or model_class._no_split_modules == [
        "LlamaDecoderLayer"
    ]
    assert not model_class.is_custom_code() and model_class.base_model_prefix == "model"
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in tiny_model("llama").model.layers)


def test_initialisation_leaves_marked_tensors_alone_and_is_by_module() -> None:
    from transformers.initialization import guard_torch_init_functions

    model = tiny_model("llama")
    marked, other = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj
    marked.weight._is_hf_initialized = True
    before = marked.weight.clone(), other.weight.clone()
    with torch.no_grad(), guard_torch_init_functions():
        for module in (marked, other):
            module._is_hf_initialized = False
            model._initialize_weights(module, model.is_custom_code())
    assert torch.equal(marked.weight, before[0]) and not torch.equal(other.weight, before[1])


def test_configs_travel_as_dictionaries_and_name_their_text_part() -> None:
    config = tiny_config("gemma3")
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    from transformers.models.auto.auto_factory import _get_model_class

    composite = transformers.AutoConfig.for_model("llama4")
    model_class = _get_model_class(composite, AutoModelForCausalLM._model_mapping)
    assert model_class.config_class is composite.sub_configs["text_config"] is type(composite.get_text_config())


def test_files_are_found_by_name() -> None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    wanted = {
        "pretrained_model_name_or_path",
        "variant",
        "gguf_file",
        "use_safetensors",
        "user_agent",
        "is_remote_code",
    }
    assert wanted | {"transformers_explicit_filename", "download_kwargs"} <= set(
        _parameters(_get_resolved_checkpoint_files)
    )


def test_gguf_files_are_read_by_a_quantizer_that_dequantises() -> None:
    pytest.importorskip("gguf")
    from transformers.quantizers.auto import get_hf_quantizer
    from transformers.utils.quantization_config import GgufConfig

    settings = GgufConfig(gguf_file="x.gguf", dequantize=True)
    reader, _, _ = get_hf_quantizer(tiny_config("llama"), settings, None, True, {}, gguf_file="x.gguf")
    for method in ("read_header", "update_dtype", "preprocess_model", "get_state_dict"):
        assert callable(getattr(reader, method))


def test_private_names_of_torch_and_of_the_hubs_client() -> None:
    from huggingface_hub import constants, get_session
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils._device import _device_constructors

    assert {torch.empty, torch.zeros, torch.full, torch.arange, torch.tensor, torch.randn} <= set(
        _device_constructors()
    )
    assert _parameters(compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]
    assert callable(get_session().head) and constants.is_offline_mode() in (True, False)
    assert constants.ENDPOINT.startswith("http") and constants.HF_HUB_CACHE
