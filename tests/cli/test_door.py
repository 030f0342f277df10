"""The Python door: the machine of the command line, from Python, on the model that the user holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import meshtune
from meshtune import AutoModelForCausalLM
from meshtune.errors import RecipeError
from tests.parity.conversations import make_conversations, make_tokenizer, write_jsonl
from tests.parity.models import save_model


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "tiny", "llama", make_tokenizer())
    write_jsonl(tmp_path / "train.jsonl", make_conversations(6, seed=0))
    return tmp_path


def settings(**training: object) -> dict:
    return {
        "distributed": {"strategy": "fsdp2", "tp_size": 1, "pp_size": 1},
        "data": {"train_path": "train.jsonl", "max_seq_length": 64},
        "training": {"epochs": 1, "learning_rate": 1e-3, "per_device_batch_size": 4, "precision": "fp32", **training},
        "logging": {"progress": "none"},
    }


def test_train_with_a_mapping_trains_the_model_in_place_and_exports_it(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny", device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = model.train(settings())
    after = model.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)
    exported = AutoModelForCausalLM.from_pretrained(str(result.export)).state_dict()
    assert all(torch.equal(after[name], exported[name]) for name in after)


def test_a_second_train_goes_on_from_the_weights_that_the_model_has(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny", device="cpu", dtype="float32")
    runs = [model.train(settings()).run for _ in range(2)]
    assert runs[0] != runs[1]
    losses = [
        [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())]
        for run in runs
    ]
    assert losses[1][0] < losses[0][0]


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_train_with_peft_puts_the_adapter_into_the_model(tiny: Path, init: str) -> None:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained("tiny", device="cpu", dtype="float32")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    peft = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": init}
    result = model.train({**settings(), "peft": peft})
    ids = torch.tensor([[5, 9, 3, 7]])
    bare = AutoModelForCausalLM.from_pretrained("tiny", dtype="float32").eval()
    with torch.no_grad():
        own, without = model.eval()(ids).logits, bare(ids).logits
        exported = PeftModel.from_pretrained(bare, str(result.export)).eval()(ids).logits
    assert (own - without).abs().max() > 1e-4, "the adapter has learnt something"
    torch.testing.assert_close(own, exported, rtol=1e-5, atol=1e-5)
    after = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(RecipeError, match="has an adapter already"):
        model.train(settings())


def test_train_keeps_its_meaning_with_a_bool_or_nothing(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny")
    assert model.train(False).training is False
    assert model.eval().training is False
    assert model.train() is model
    assert model.training is True


def test_the_model_is_its_transformers_class(tiny: Path) -> None:
    import transformers

    model = AutoModelForCausalLM.from_pretrained("tiny", attention="eager")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.config._attn_implementation == "eager"
    assert type(model).forward is transformers.LlamaForCausalLM.forward
    assert "train" not in vars(transformers.LlamaForCausalLM)
    model.save_pretrained("saved")
    assert json.loads(Path("saved/config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]


def test_meshtune_train_takes_a_path_a_mapping_or_a_recipe(tiny: Path) -> None:
    mapping = {"model": {"name": "tiny"}, **settings(max_steps=1)}
    results = [
        meshtune.train({**mapping, "checkpoint": {"dir": "one"}}),
        meshtune.train("one/recipe.resolved.yaml"),
    ]
    assert [result.state.step for result in results] == [1, 1]
    assert results[1].run == Path("one")


def test_a_typo_is_an_error_before_anything_is_loaded(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny")
    with pytest.raises(RecipeError, match=r"learning_rat.*learning_rate"):
        model.train({**settings(), "training": {"learning_rat": 1e-5}})
    with pytest.raises(RecipeError, match=r"model\.name"):
        model.train({**settings(), "model": {"name": "other"}})
    with pytest.raises(TypeError, match="mapping"):
        model.train("recipe.yaml")
    with pytest.raises(RecipeError, match="dtyp"):
        AutoModelForCausalLM.from_pretrained("tiny", dtyp="float32")
