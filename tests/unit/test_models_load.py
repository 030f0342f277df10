"""Checkpoints load straight into a model built on meta, bit-equal to a plain `from_pretrained`; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtune.errors import ModelError
from meshtune.models import hf
from meshtune.models.export import export
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from tests.unit.models_tiny import CONFIGS, save_tiny, saved_source, tiny_model

CPU = torch.device("cpu")


def _load(folder: Path, **section: object) -> PreTrainedModel:
    source = saved_source(folder, **section)
    model = hf.build(source, "eager")
    assert all(tensor.is_meta for tensor in model.parameters())
    hf.load(model, source, CPU)
    return model


def _assert_equal(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    for kind in (PreTrainedModel.named_parameters, PreTrainedModel.named_buffers):
        ours, theirs = dict(kind(found, remove_duplicate=False)), dict(kind(wanted, remove_duplicate=False))
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert found.all_tied_weights_keys == wanted.all_tied_weights_keys
    for target, origin in found.all_tied_weights_keys.items():
        assert found.get_parameter(target) is found.get_parameter(origin)
    assert found.training and all(parameter.requires_grad for parameter in found.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_and_buffer_is_what_from_pretrained_gives(name: str, tmp_path: Path) -> None:
    """Dense and MoE (experts apart in the file), tied and not, with buffers; half the files in bf16, masters in fp32."""
    folder = save_tiny(name, tmp_path / "model", torch.bfloat16 if len(name) % 2 else torch.float32)
    _assert_equal(_load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_masters_are_float32_unless_the_recipe_names_a_dtype(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    """C46: below float32 small updates are lost."""
    folder = save_tiny("llama", tmp_path, stored)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    _assert_equal(_load(folder, dtype=dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=wanted))
    assert saved_source(folder).export_dtype == stored


def test_several_files_and_a_file_of_mixed_dtypes(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    first = sorted(folder.glob("*.safetensors"))[0]
    _rewrite(
        first, lambda tensors: {name: t.float() * 1.001 if i % 2 else t for i, (name, t) in enumerate(tensors.items())}
    )
    _assert_equal(_load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _rewrite(file: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_names_of_old_checkpoints(tmp_path: Path) -> None:
    """Layer norms as gamma and beta; a trunk without its prefix, with mask buffers that no model has any more."""
    bert = save_tiny("bert", tmp_path / "bert")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    _rewrite(bert / "model.safetensors", lambda ts: {_replaced(name, old): t for name, t in ts.items()})
    gpt2 = save_tiny("gpt2", tmp_path / "gpt2")
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    _rewrite(gpt2 / "model.safetensors", lambda ts: {n.removeprefix("transformer."): t for n, t in ts.items()} | mask)
    for folder in (bert, gpt2):
        _assert_equal(_load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _replaced(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("stored", ["lm_head.weight", "both"])
def test_tied_weights_stored_under_another_name_or_twice(stored: str, tmp_path: Path) -> None:
    """C65: one parameter, whichever of its names the file has."""
    folder = save_tiny("llama-tied", tmp_path)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors["model.embed_tokens.weight"]
        if stored != "both":
            del tensors["model.embed_tokens.weight"]
        return {**tensors, "lm_head.weight": weight.clone()}

    _rewrite(folder / "model.safetensors", change)
    _assert_equal(_load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _error(folder: Path, **section: object) -> str:
    with pytest.raises(ModelError) as error:
        _load(folder, **section)
    return str(error.value)


def _drop(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_named(tmp_path: Path) -> None:
    """C73: nothing is initialised in silence."""
    folder = save_tiny("llama", tmp_path)
    file = folder / "model.safetensors"
    _rewrite(file, _drop("model.norm.weight", "model.layers.1.mlp.up_proj.weight"))
    _rewrite(
        file, lambda tensors: {**tensors, "visual.patch.weight": torch.zeros(2), "model.layers.0.extra": torch.zeros(1)}
    )
    _rewrite(file, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(96, 48)})
    message = _error(folder)
    assert "missing from the checkpoint: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "in the checkpoint but not in the model: model.layers.0.extra, visual.patch.weight" in message
    assert "lm_head.weight has shape (96, 48) in the checkpoint and (97, 48) in the model" in message


def test_unexpected_tensors_may_be_allowed_by_name_and_only_those(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    extra = {"visual.patch.weight": torch.zeros(2), "mtp.0.weight": torch.zeros(2)}
    _rewrite(folder / "model.safetensors", lambda tensors: {**tensors, **extra})
    assert (
        "visual.patch.weight" not in (message := _error(folder, allow_unexpected=["^visual"]))
        and "mtp.0.weight" in message
    )
    _load(folder, allow_unexpected=["^visual", "^mtp"])


def test_a_checkpoint_of_another_model_names_what_does_not_fit(tmp_path: Path) -> None:
    """C73: only unrelated keys."""
    folder = save_tiny("llama", tmp_path)
    _rewrite(folder / "model.safetensors", lambda tensors: {"other.weight": torch.zeros(2)})
    message = _error(folder)
    assert "other.weight" in message and "lm_head.weight" in message and "more" in message


def test_an_expert_missing_from_the_file_is_an_error(tmp_path: Path) -> None:
    """C64: experts that were not in the file would train from random weights."""
    folder = save_tiny("mixtral", tmp_path)
    names = list(load_file(folder / "model.safetensors"))
    expert = next(name for name in names if ".experts.2." in name)
    _rewrite(folder / "model.safetensors", _drop(expert))
    assert "experts" in _error(folder)


def test_two_different_tensors_under_tied_names_are_an_error(tmp_path: Path) -> None:
    """C65: which of the two would be trained?"""
    folder = save_tiny("llama-tied", tmp_path)
    _rewrite(folder / "model.safetensors", lambda tensors: {**tensors, "lm_head.weight": torch.zeros(97, 48)})
    message = _error(folder)
    assert "ties lm_head.weight to model.embed_tokens.weight" in message and "tie_word_embeddings" in message


def test_truncated_and_absent_files_are_named(tmp_path: Path) -> None:
    """C73."""
    whole = save_tiny("llama", tmp_path / "whole") / "model.safetensors"
    data = whole.read_bytes()
    for length in (len(data) // 2, len(data) - 1, 9, 3, 0):
        whole.write_bytes(data[:length])
        assert str(whole) in (message := _error(whole.parent)) and "truncated" in message
    whole.write_bytes(data + b"x")
    assert "damaged" in _error(whole.parent)
    whole.unlink()
    assert "no safetensors weights" in _error(whole.parent) and "weights: random" in _error(whole.parent)
    sharded = save_tiny("llama", tmp_path / "sharded", max_shard_size="20KB")
    absent = sorted(sharded.glob("*.safetensors"))[1]
    absent.unlink()
    assert f"of which these are missing: {absent.name}" in _error(sharded)
    (sharded / "model.safetensors.index.json").write_text("{", encoding="utf-8")
    assert "is not a safetensors index" in _error(sharded)


def test_a_tensor_listed_in_the_index_but_in_no_file_is_missing(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    _rewrite(folder / index["weight_map"]["model.norm.weight"], _drop("model.norm.weight"))
    assert "missing from the checkpoint: model.norm.weight" in _error(folder)


def _write_gguf(file: Path, model: PreTrainedModel) -> None:
    """A llama as llama.cpp writes it: its own names, queries and keys permuted, a matrix in 8 bits."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if "up_proj" in name else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_and_is_exported_in_hugging_face_names(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
    }
    original = tiny_model("llama", **sizes)
    _write_gguf(tmp_path / "tiny.gguf", original)
    source = resolve(ModelSection(name=str(tmp_path / "tiny.gguf")))
    model = hf.build(source, "eager")
    hf.load(model, source, CPU)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    _assert_equal(model, wanted)
    for name, tensor in original.named_parameters():
        if "up_proj" not in name:
            assert torch.equal(model.get_parameter(name), tensor), name
    export(model, source, None, tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_gguf_file_of_another_shape_or_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing that fits")
    with pytest.raises(ModelError, match="no config could be read"):
        resolve(ModelSection(name=str(tmp_path / "broken.gguf")))
