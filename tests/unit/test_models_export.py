"""An export has the names, dtypes and files of the checkpoint that the model came from, and reloads in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from meshtune.models import hf
from meshtune.models.export import export
from meshtune.models.initialize import fill, initialize
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, resolve
from tests.unit.models_tiny import CONFIGS, save_tiny, saved_source

CPU = torch.device("cpu")
RESUMED = ["llama-tied", "mixtral", "deepseek_v3", "hrm_text", "gpt2", "bert"]
IDS = torch.randint(4, 90, (1, 9), generator=torch.Generator().manual_seed(3))


def _loaded(source: Source) -> PreTrainedModel:
    model = hf.build(source, "eager")
    hf.load(model, source, CPU)
    return model


def _resumed(source: Source) -> PreTrainedModel:
    """As a run that continues has it: its weights came from a run's checkpoint, not from the model's."""
    model = hf.build(source, "eager")
    initialize(model, None, CPU)
    fill(model, _loaded(source).state_dict())
    return model


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def _assert_same_tensors(found: Path, wanted: Path) -> None:
    ours, theirs = _tensors(found), _tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("prepare", "name"), [*((_loaded, name) for name in CONFIGS), *((_resumed, name) for name in RESUMED)]
)
def test_an_untrained_round_trip_is_bit_identical(
    name: str, prepare: Callable[[Source], PreTrainedModel], tmp_path: Path
) -> None:
    """Tensor for tensor, by the same names, experts apart again, tied heads left out; C65, C74."""
    folder = save_tiny(name, tmp_path / "model", torch.float32 if len(name) % 2 else torch.bfloat16)
    source = saved_source(folder)
    export(prepare(source), source, None, tmp_path / "export")
    _assert_same_tensors(tmp_path / "export", folder)
    assert _json(tmp_path / "export" / "config.json") == _json(folder / "config.json")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("prepare", [_loaded, _resumed])
def test_old_names_and_what_no_model_reads_are_written_as_they_were(
    prepare: Callable[[Source], PreTrainedModel], tmp_path: Path
) -> None:
    bert = save_tiny("bert", tmp_path / "bert")
    old = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")]
    _rewrite(bert, lambda ts: {_replaced(name, old): tensor for name, tensor in ts.items()})
    gpt2 = save_tiny("gpt2", tmp_path / "gpt2")
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    _rewrite(gpt2, lambda ts: {name.removeprefix("transformer."): tensor for name, tensor in ts.items()} | mask)
    for folder in (bert, gpt2):
        source = saved_source(folder)
        export(prepare(source), source, None, tmp_path / "export")
        _assert_same_tensors(tmp_path / "export", folder)


def _replaced(name: str, table: list[tuple[str, str]]) -> str:
    for old, new in table:
        name = name.replace(old, new)
    return name


def test_what_may_be_left_out_of_the_model_is_kept_in_its_checkpoint(tmp_path: Path) -> None:
    """A vision tower or layers that predict further tokens stay what they were, beside weights that were trained."""
    folder = save_tiny("llama", tmp_path / "model")
    _rewrite(folder, lambda tensors: {**tensors, "visual.weight": torch.ones(3, dtype=torch.float16)})
    source = saved_source(folder, allow_unexpected=["^visual"])
    model = _loaded(source)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    export(model, source, None, tmp_path / "export")
    before, after = _tensors(folder), _tensors(tmp_path / "export")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert (
        before.keys() == after.keys()
        and changed == {"lm_head.weight"}
        and after["visual.weight"].dtype == torch.float16
    )


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [[_EMBEDDING], [_HEAD], [_EMBEDDING, _HEAD]])
@pytest.mark.parametrize("prepare", [_loaded, _resumed])
def test_tied_weights_are_written_under_the_names_that_the_checkpoint_has(
    prepare: Callable[[Source], PreTrainedModel], stored: list[str], tmp_path: Path
) -> None:
    """C65: and each with the trained value."""
    folder = save_tiny("llama-tied", tmp_path / "model")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors.pop(_EMBEDDING)
        return {**tensors, **{name: weight.clone() for name in stored}}

    _rewrite(folder, change)
    source = saved_source(folder)
    model = prepare(source)
    export(model, source, None, tmp_path / "export")
    _assert_same_tensors(tmp_path / "export", folder)
    with torch.no_grad():
        model.lm_head.weight.fill_(7)
    export(model, source, None, tmp_path / "export")
    tensors = _tensors(tmp_path / "export")
    assert all((tensors[name] == 7).all() for name in stored)


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path / "model")
    kept = torch.tensor([3, 4], dtype=torch.int32)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        mixed = {name: t.float() * 1.0001 if "norm" in name or ".w1." in name else t for name, t in tensors.items()}
        return {**mixed, "counts": kept}

    _rewrite(folder, change)
    source = saved_source(folder, allow_unexpected=["counts"])
    model = _loaded(source)
    export(model, source, None, tmp_path / "export")
    _assert_same_tensors(tmp_path / "export", folder)
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for dtype in (torch.float32, torch.float16):
        export(model, source, None, tmp_path / "export", dtype)
        assert {t.dtype for t in _tensors(tmp_path / "export").values()} == {dtype, torch.int32}
        assert _json(tmp_path / "export" / "config.json")["dtype"] == str(dtype).removeprefix("torch.")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, live[name]), name


def test_a_named_dtype_is_that_of_the_export_and_of_every_part_of_the_config(tmp_path: Path) -> None:
    """C74."""
    folder = save_tiny("llama", tmp_path / "model", torch.float32)
    config = _json(folder / "config.json")
    config.pop("dtype")
    config |= {"torch_dtype": "float32", "vision_config": {"hidden_size": 3}, "unknown": "käse"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source = saved_source(folder, dtype="bfloat16")
    export(_loaded(source), source, None, tmp_path / "export")
    assert {tensor.dtype for tensor in _tensors(tmp_path / "export").values()} == {torch.bfloat16}
    wanted = config | {"torch_dtype": "bfloat16", "vision_config": {"hidden_size": 3, "dtype": "bfloat16"}}
    assert _json(tmp_path / "export" / "config.json") == wanted


def test_files_of_a_limited_size_have_an_index(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "model")
    source = saved_source(folder)
    export(_loaded(source), source, None, tmp_path / "export", max_shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    index = _json(tmp_path / "export" / "model.safetensors.index.json")
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 2
    for file in files:
        tensors = load_file(tmp_path / "export" / file)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
        assert {name for name, place in index["weight_map"].items() if place == file} == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in _tensors(folder).values())
    _assert_same_tensors(tmp_path / "export", folder)
    export(_loaded(source), source, None, tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").glob("*model*")] == ["model.safetensors"]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "hi": 2, "ok": 3}, unk_token="hi"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['content'] }} <end> {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, pad_token="<pad>", eos_token="<end>")


@pytest.mark.parametrize("name", ["llama-odd", "gemma2", "cohere2", "mixtral", "gpt_oss", "gpt2", "deepseek_v3"])
def test_transformers_reloads_the_folder_with_the_same_logits(name: str, tmp_path: Path) -> None:
    """C74, with the tokenizer and its template, and the settings of generation."""
    folder = save_tiny(name, tmp_path / "model", torch.float32)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(folder)
    source = saved_source(folder)
    model = _loaded(source).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        wanted = model(input_ids=IDS).logits
        export(model, source, _tokenizer(), tmp_path / "export")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
        assert torch.equal(again(input_ids=IDS).logits, wanted)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert (
        tokenizer.apply_chat_template(chat)["input_ids"]
        == _tokenizer().apply_chat_template(chat)["input_ids"]
        == [2, 1, 3, 1]
    )
    assert tokenizer.pad_token == "<pad>" and again.generation_config.temperature == 0.25


def test_a_model_from_random_weights_is_written_as_a_new_one(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "config")
    (tmp_path / "config" / "model.safetensors").unlink()
    source = resolve(ModelSection(name=str(tmp_path / "config"), weights="random"))
    model = hf.build(source, "eager")
    initialize(model, 1, CPU)
    export(model, source, None, tmp_path / "export", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert _json(tmp_path / "export" / "config.json")["architectures"] == ["Qwen3MoeForCausalLM"]


def test_the_text_model_of_a_composites_config_is_written_with_its_own(tmp_path: Path) -> None:
    """From random weights there is nothing but the text model to write."""
    text = {
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "vocab_size": 97,
        "num_attention_heads": 4,
    }
    composite = AutoConfig.for_model("qwen3_5", text_config=text | {"num_key_value_heads": 2, "head_dim": 16})
    composite.save_pretrained(tmp_path / "config")
    source = resolve(ModelSection(name=str(tmp_path / "config"), weights="random"))
    model = hf.build(source, "eager")
    initialize(model, 1, CPU)
    export(model, source, None, tmp_path / "export")
    assert _json(tmp_path / "export" / "config.json")["model_type"] == source.config.model_type != "qwen3_5"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert again.state_dict().keys() == model.state_dict().keys()


class _Full:
    """A tokenizer that cannot be written."""

    def save_pretrained(self, _: Path) -> None:
        raise OSError(28, "No space left on device")


def test_an_export_that_fails_leaves_what_stood_there(tmp_path: Path) -> None:
    """C71: nothing half-written under the final name; the next export clears what is left."""
    source = saved_source(save_tiny("llama", tmp_path / "model"))
    model, target = _loaded(source), tmp_path / "runs" / "export"
    with pytest.raises(OSError, match=r"could not be written to .*export: OSError: \[Errno 28\] No space left"):
        export(model, source, _Full(), target)
    assert not target.exists()
    export(model, source, None, target)
    (target / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(OSError):
        export(model, source, _Full(), target)
    assert (target / "mine.txt").exists() and _tensors(target)
    export(model, source, None, target)
    assert not (target / "mine.txt").exists() and [path.name for path in target.parent.iterdir()] == ["export"]


def test_a_file_cut_short_without_an_error_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(tensors: dict[str, Tensor], path: Path, **settings: Any) -> None:
        save_file(tensors, path, **settings)
        path.write_bytes(path.read_bytes()[:-5])

    monkeypatch.setattr("meshtune.models.shards.save_file", cut)
    source = saved_source(save_tiny("llama", tmp_path / "model"))
    with pytest.raises(OSError, match="truncated or damaged"):
        export(_loaded(source), source, None, tmp_path / "export")
    assert not (tmp_path / "export").exists()
