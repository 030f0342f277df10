"""What a recipe names is found and judged before any weight is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from meshtune.errors import ModelError
from meshtune.models import hf, hub
from meshtune.models.section import ModelSection
from meshtune.models.source import load_tokenizer, resolve
from tests.unit.models_tiny import save_tiny, tiny_config


def _error(name: str | Path, **section: Any) -> str:
    with pytest.raises(ModelError) as error:
        resolve(ModelSection(name=str(name), **section))
    return str(error.value)


def _folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_what_a_source_tells(tmp_path: Path) -> None:
    source = resolve(ModelSection(name=str(save_tiny("qwen3_moe", tmp_path))))
    assert (source.max_positions, source.dtype, source.master_dtype) == (64, torch.bfloat16, torch.float32)
    assert source.facts() == {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_hidden_layers": 2}
    assert source.model_class is type(AutoModelForCausalLM.from_config(tiny_config("qwen3_moe")))


def test_a_model_that_is_not_a_causal_language_model_is_refused_by_its_type(tmp_path: Path) -> None:
    message = _error(_folder(tmp_path, model_type="t5", architectures=["T5ForConditionalGeneration"]))
    assert "model_type 't5', for which transformers has no causal language model" in message


def test_a_classifiers_checkpoint_does_not_pass_for_a_language_model(tmp_path: Path) -> None:
    """Its config resolves to the same architecture; its tensors do not fit."""
    save_tiny("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    classifier = type(AutoConfig.for_model("bert")).from_dict({**config, "num_labels": 2})
    from transformers import BertForSequenceClassification

    BertForSequenceClassification(classifier).save_pretrained(tmp_path)
    source = resolve(ModelSection(name=str(tmp_path)))
    with pytest.raises(ModelError) as error:
        hf.load(hf.build(source, "eager"), source, torch.device("cpu"))
    assert "classifier.weight" in str(error.value) and "cls.predictions.bias" in str(error.value)


def test_quantised_checkpoints_are_refused_with_the_method(tmp_path: Path) -> None:
    config = tiny_config("llama").to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "is quantised (gptq)" in _error(_folder(tmp_path, **config))


_REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "nobody-knows"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_remote_code_runs_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = save_tiny("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    _folder(folder, **config | {"model_type": "nobody-knows", "auto_map": auto_map})
    (folder / "code.py").write_text(_REMOTE_CODE, encoding="utf-8")
    assert "to run it write `trust_remote_code: true`" in _error(folder)
    assert not (tmp_path / "modules").exists()
    source = resolve(ModelSection(name=str(folder), trust_remote_code=True))
    model = hf.build(source, "eager")
    hf.load(model, source, torch.device("cpu"))
    assert type(model).__name__ == "Model" and model.is_custom_code()


def test_a_composite_gives_its_text_model() -> None:
    """As AutoModelForCausalLM does for checkpoints that also hold a vision tower."""
    from meshtune.models.source import causal_lm

    config = AutoConfig.for_model("llama4")
    model_class, text = causal_lm(config)
    assert model_class.__name__ == "Llama4ForCausalLM" and text is config.text_config


@pytest.mark.parametrize("name", ["./nosuch", "/nosuch/folder", "a/b/c", "~/nosuch", "nosuch.gguf"])
def test_a_path_that_is_not_there_is_told_apart_from_a_hub_id(name: str) -> None:
    message = _error(name)
    assert "there is no" in message and name.removeprefix("~") in message


def test_a_folder_without_a_config_says_what_a_model_folder_holds(tmp_path: Path) -> None:
    assert "has no config.json; a Hugging Face model folder holds" in _error(tmp_path)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_id_without_the_hub_fails_in_seconds_and_says_why(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client tries again for minutes."""
    hub.unreachable.cache_clear()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    message = _error("someone/nosuch-model")
    with pytest.raises(
        ModelError, match=r"model.tokenizer: no tokenizer could be loaded from someone/nosuch-model: no folder"
    ):
        load_tokenizer(ModelSection(name="someone/nosuch-model"))
    assert time.monotonic() - started < 5
    wanted = "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 cannot be reached"
    assert "no folder has this name, the hub's cache" in message and wanted in message
    hub.unreachable.cache_clear()


def test_a_folder_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "unreachable", asked)
    save_tiny("llama", tmp_path)
    resolve(ModelSection(name=str(tmp_path)))
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(ModelSection(name=str(tmp_path)))


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}").save_pretrained(tmp_path / "words")
    model = save_tiny("llama", tmp_path / "model")
    tokenizer = load_tokenizer(ModelSection(name=str(model), tokenizer=str(tmp_path / "words")))
    assert tokenizer("b a")["input_ids"] == [1, 0] and tokenizer.chat_template == "{{ messages }}"


def test_settings_without_effect_are_problems() -> None:
    found = [key for key, _ in ModelSection(name="x.gguf", weights="random", allow_unexpected=["a"]).problems()]
    assert sorted(found) == ["allow_unexpected", "name"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors"])
@pytest.mark.parametrize("explicit", [None, "other.safetensors.index.json"])
def test_an_index_names_no_file_outside_its_folder(tmp_path: Path, name: str, explicit: str | None) -> None:
    """Also one that the config names instead of the usual one."""
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    if explicit:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _folder(folder, **config, transformers_weights=explicit)
    index = folder / (explicit or "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}), encoding="utf-8")
    message = _error(folder)
    assert f"{name!r} is not the name of a file inside {folder}" in message
    assert message.startswith(f"model.name: {index}")


def test_weights_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    """Whose snapshots hold nothing but links to its blobs."""
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    try:
        (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    except OSError:
        pytest.skip("no right to make links")
    assert resolve(ModelSection(name=str(folder))).files


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_weights_that_are_pickles_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not even opened."""
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(1)}, folder / name)
    monkeypatch.setattr(torch, "load", None)
    message = _error(folder)
    assert f"are pickles ({name}), which are not read" in message and "save_pretrained" in message
