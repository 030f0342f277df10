"""Adapters in PEFT's own files and merged into their weights: what PEFT computes is what comes out; C77, C79."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtune.config import from_mapping
from meshtune.errors import ModelError, RecipeError
from meshtune.models import hf
from meshtune.models.adapters import files
from meshtune.models.adapters.inject import inject
from meshtune.models.adapters.merging import LowRank, Merging, Part, changes
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.adapters.values import initialize_adapter
from meshtune.models.adapters.view import Adapter, base_view, remember
from meshtune.models.adapters.writing import export_adapter, of_the_weights
from meshtune.recipes import adapting, merging
from meshtune.recipes.recipe import Recipe
from tests.unit.models_tiny import save_tiny, saved_source, tiny_model, tiny_source

IDS = torch.randint(4, 90, (1, 9), generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3}),
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.k_proj": 32},
        },
    ),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}),
    "experts turned": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}),
    "embedding": ("llama-tied", {"target_modules": ["embed_tokens"]}),
    "head": ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
    "saved": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]}),
    "tokens": ("llama-tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]}),
    "head and tokens": ("llama-tied", {"target_modules": ["lm_head"], "trainable_token_indices": [5, 9]}),
}


def _wrapped(model: PreTrainedModel, **config: Any) -> tuple[PreTrainedModel, Any]:
    """The model with an adapter whose tensors are all random, and PEFT's model around it."""
    from peft import LoraConfig, PeftModel

    peft_model = PeftModel(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    inner = {path: "" for path, module in model.named_modules() if _is_outermost(model, path, module)}
    trained = frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    remember(model, Adapter(None, peft_model.peft_config["default"], inner, trained))  # type: ignore[arg-type]
    return model, peft_model


def _is_outermost(model: PreTrainedModel, path: str, module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return isinstance(module, kinds) and not isinstance(model.get_submodule(path.rpartition(".")[0]), kinds)


def _adapter(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_of_pefts_files(case: str, tmp_path: Path) -> None:
    name, config = CASES[case]
    model, peft_model = _wrapped(tiny_model(name), **config)
    peft_model.save_pretrained(tmp_path, save_embedding_layers=False)
    written = load_file(tmp_path / files.WEIGHTS)
    tensors = _adapter(model)
    # transformers does not find DoRA's magnitudes as PEFT writes them; PEFT finds them either way.
    wanted = {f"{one}.weight" if one.endswith("magnitude_vector") else one for one in written}
    assert {files.file_name(one) for one in tensors} == wanted
    for one, tensor in files.read(tmp_path, list(tensors)).items():
        assert torch.equal(tensor, tensors[one]), one


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_computes_what_the_adapter_does(case: str) -> None:
    name, config = CASES[case]
    bare = tiny_model(name)
    model, peft_model = _wrapped(copy.deepcopy(bare), **config)
    with torch.no_grad():
        wanted = peft_model(input_ids=IDS, use_cache=False).logits
        assert not torch.allclose(wanted, bare(input_ids=IDS, use_cache=False).logits, atol=1e-3)
        merging = Merging([Part("it", changes(model, _adapter(model)))], {})
        untied = merging.untied(bare)
        assert bool(untied) == (name == "llama-tied" and case != "tokens")
        if untied:
            bare.lm_head.weight = torch.nn.Parameter(bare.lm_head.weight.clone())
        bare.load_state_dict(merging(bare.state_dict(), torch.float32))
        found = bare(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_merge_rounds_once_and_says_what_rounding_takes_back() -> None:
    """C79: a bf16 base under small fp32 matrices."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(64, 64, generator=generator).to(torch.bfloat16)
    a, b = (0.02 * torch.randn(shape, generator=generator) for shape in ((8, 64), (64, 8)))
    merging = Merging([Part("it", {"w": LowRank(a, b, 2.0)})], {"name": "base"})
    found = merging({"w": base, "other": base}, torch.bfloat16)
    assert found["w"].dtype == torch.float32 and found["other"] is base
    rounded = found["w"].to(torch.bfloat16)
    assert torch.equal(rounded, (base.float() + 2.0 * (b @ a)).to(torch.bfloat16))
    assert not torch.equal(rounded, base + (2.0 * (b @ a)).to(torch.bfloat16)), "or this shows nothing"
    record = merging.record()
    assert record["changed"] == 64 * 64 and record["lost_to_rounding"] == int((rounded == base).sum()) > 0


def test_adapters_are_merged_one_after_another_and_by_parts() -> None:
    """The second is merged into what the first has left, which for DoRA is another weight."""
    w, a, b, m = torch.randn(6, 5), torch.randn(2, 5), torch.randn(6, 2), torch.rand(6) + 1
    plain, dora = LowRank(a, b, 0.5), LowRank(a, b, 0.5, magnitude=m)
    both = Merging([Part("one", {"w": plain}), Part("two", {"w": dora})], {})
    first = w + 0.5 * (b @ a)
    second = first + 0.5 * (b @ a)
    torch.testing.assert_close(both({"w": w}, w.dtype)["w"], m[:, None] * second / second.norm(dim=1, keepdim=True))
    half = Merging([Part("one", {"w": plain}, 0.5)], {})
    torch.testing.assert_close(half({"w": w}, w.dtype)["w"], w + 0.25 * (b @ a))
    half = Merging([Part("one", {"w": dora}, 0.5)], {})
    torch.testing.assert_close(half({"w": w}, w.dtype)["w"], (w + dora(w)) / 2)


def _saved(folder: Path) -> list[str]:
    """Names of the tensors of an adapter whose folder PEFT has written."""
    model, peft_model = _wrapped(tiny_model("llama"), target_modules=["q_proj"])
    peft_model.save_pretrained(folder)
    return list(_adapter(model))


def test_a_file_with_other_names_is_refused_and_names_them(tmp_path: Path) -> None:
    """C77: PEFT itself loads such a file and leaves every matrix as it was."""
    names = _saved(tmp_path)
    file = tmp_path / files.WEIGHTS
    right = load_file(file)
    save_file({f"model.{name}": tensor for name, tensor in right.items()}, file)
    with pytest.raises(ModelError) as error:
        files.read(tmp_path, names)
    missing = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert f"{missing} is missing" in str(error.value)
    assert f"model.{missing} is not of this adapter" in str(error.value)
    assert "begin with base_model.model." in str(error.value)
    save_file({name: tensor for name, tensor in right.items() if "layers.0" not in name}, file)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.lora_B\.weight is missing"):
        files.read(tmp_path, names)


def test_a_file_that_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    _saved(tmp_path)
    asked = from_mapping(
        Recipe,
        {
            "model": {"name": "x/y"},
            "data": {"train_path": "rows.jsonl"},
            "training": {"learning_rate": 1e-4},
            "peft": {"adapter": str(tmp_path)},
        },
    )
    source, file = tiny_source("llama"), tmp_path / files.WEIGHTS
    assert adapting.choose(asked, source) is not None
    right = load_file(file)
    save_file({name: tensor for name, tensor in right.items() if "layers.0" not in name}, file)
    with pytest.raises(ModelError, match=r"peft.adapter: .* does not fit .*(?s:.*)lora_B\.weight is missing"):
        adapting.choose(asked, source)
    save_file({name: tensor[:, :2].contiguous() for name, tensor in right.items()}, file)
    with pytest.raises(ModelError, match=r"peft.adapter: .* is of another model"):
        adapting.choose(asked, source)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"^peft.adapter: .* is truncated"):
        adapting.choose(asked, source)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA; wanted LORA"),
        ({"bias": "all"}, "asks for what is not done here: bias: 'all'"),
        ({"lora_bias": True, "a_key_of_later": 3}, "not done here: lora_bias: True, a_key_of_later: 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": "many"}, "says r: 'many'; wanted a number above 0"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    files.write_config(tmp_path, LoraConfig(target_modules=["q_proj"]), "base/model")
    config = json.loads((tmp_path / files.CONFIG).read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "base/model" and config["task_type"] == "CAUSAL_LM"
    assert files.read_config(tmp_path).target_modules == {"q_proj"}
    (tmp_path / files.CONFIG).write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(ModelError) as error:
        files.read_config(tmp_path)
    assert says in str(error.value)


def test_what_is_no_adapters_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        files.find(str(tmp_path))
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelError, match="pickle"):
        files.find(str(tmp_path))
    needed = {"data": {"train_path": "rows.jsonl"}, "training": {"learning_rate": 1e-4}}
    asked = from_mapping(Recipe, {"model": {"name": "x/y"}, **needed})
    with pytest.raises(ModelError, match=r"^--adapter: .* pickle"):  # before anything of the run is read
        merging.check(merging.Merge((str(tmp_path),)), asked)


def test_a_run_whose_weights_were_trained_has_no_other_base() -> None:
    """Quantisation-aware training holds weights in float: there is nothing to choose between."""
    needed = {"data": {"train_path": "rows.jsonl"}, "training": {"learning_rate": 1e-4}}
    quantised = {"quantization": {"type": "int4", "qat": True}}
    asked = from_mapping(Recipe, {"model": {"name": "x/y"}, **needed, **quantised})
    with pytest.raises(RecipeError, match=r"^--base original: the run's weights were not quantised"):
        merging.check(merging.Merge(("an/adapter",), base="original"), asked)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_what_it_left_of_the_weights_is_written_as_one_of_the_weights(rslora: bool) -> None:
    """PiSSA and OLoRA: whoever loads the file has the weights themselves. An embedding begins as ever, beside such layers."""
    from peft import LoraConfig

    model = tiny_model("llama")
    config: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "o_proj", "embed_tokens"],
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 5},
        "use_rslora": rslora,
    }
    wrapped, _ = _wrapped(copy.deepcopy(model), **config)
    tensors = _adapter(wrapped)
    began = {
        name.removesuffix("weight") + "initial": torch.randn(t.shape)
        for name, t in tensors.items()
        if name.endswith(("lora_A.default.weight", "lora_B.default.weight"))
    }
    wanted = Merging([Part("it", changes(wrapped, {**tensors, **began}))], {})(model.state_dict(), torch.float32)
    joined, doubled = of_the_weights({**tensors, **began}, LoraConfig(**config))
    again, _ = _wrapped(copy.deepcopy(model), **_shape(doubled))
    assert {name: t.shape for name, t in joined.items()} == {name: t.shape for name, t in _adapter(again).items()}
    found = Merging([Part("it", changes(again, joined))], {})(model.state_dict(), torch.float32)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)


def _shape(config: Any) -> dict[str, Any]:
    keys = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora")
    return {key: getattr(config, key) for key in keys}


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapter_goes_into_a_model_and_out_again(case: str, tmp_path: Path) -> None:
    """C77: from PEFT's folder into a model on meta, and from there into a folder with which PEFT computes the same."""
    from peft import PeftModel

    name, config = CASES[case]
    base = save_tiny(name, tmp_path / "base", torch.float32)
    bare = AutoModelForCausalLM.from_pretrained(base)
    _, peft_model = _wrapped(copy.deepcopy(bare), **config)
    peft_model.save_pretrained(tmp_path / "theirs")  # with the embedding whole, where that has an adapter
    with torch.no_grad():
        wanted = peft_model.eval()(input_ids=IDS, use_cache=False).logits
    source = saved_source(base)
    model = hf.build(source, "eager")
    found = files.find(str(tmp_path / "theirs"))
    adapter = inject(model, AdapterSection(adapter=str(found)), files.read_config(found))
    hf.load(base_view(model), source, torch.device("cpu"))
    initialize_adapter(model, 0, torch.device("cpu"))
    files.fill(model, adapter, found)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=IDS, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    export_adapter(model, adapter, source, None, tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")  # which finds the base by the config
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=IDS, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    again = PeftModel.from_pretrained(bare, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=IDS, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)


def test_experts_that_had_a_layer_each_are_read_as_peft_reads_them(tmp_path: Path) -> None:
    """As adapters of older versions of transformers have them: gate and up apart, for every expert."""
    from peft import LoraConfig, PeftModel

    base = save_tiny("qwen3_moe", tmp_path / "base", torch.float32)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    files.write_config(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules=targets), str(base))
    torch.manual_seed(0)
    shapes = {"gate_proj": (48, 16), "up_proj": (48, 16), "down_proj": (16, 48)}  # in and out
    experts = {f"mlp.experts.{e}.{name}": shape for e in range(4) for name, shape in shapes.items()}
    old = {}
    for layer in range(2):
        for name, (inputs, outputs) in {**experts, "self_attn.q_proj": (48, 48)}.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            old[f"{path}.lora_A.weight"] = 0.2 * torch.randn(4, inputs)
            old[f"{path}.lora_B.weight"] = 0.2 * torch.randn(outputs, 4)
    save_file(old, tmp_path / files.WEIGHTS)
    with torch.no_grad():
        theirs: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
        wanted = theirs(input_ids=IDS, use_cache=False).logits
        source = saved_source(base)
        model = hf.build(source, "eager")
        adapter = inject(model, AdapterSection(adapter=str(tmp_path)), files.read_config(tmp_path))
        hf.load(base_view(model), source, torch.device("cpu"))
        initialize_adapter(model, 0, torch.device("cpu"))
        files.fill(model, adapter, tmp_path)
        found = model.eval()(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        export_adapter(model, adapter, source, None, tmp_path / "ours")
        again: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
        torch.testing.assert_close(again(input_ids=IDS, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
