"""Optimizers by name, and parameters in groups by pattern: what is refused, what is decided, and how much is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from meshtune.config import from_mapping
from meshtune.errors import ModelError, RecipeError
from meshtune.models.section import ModelSection
from meshtune.models.trainable import find_trained, tensor_names
from meshtune.optim import methods
from meshtune.optim.build import Known
from meshtune.optim.groups import GroupSection, assign, faster_b
from meshtune.optim.kept import kept, state_bytes
from meshtune.optim.methods import METHODS, check_installed
from meshtune.optim.section import OptimizerSection
from meshtune.recipes import optimizing
from meshtune.recipes.recipe import Recipe
from tests.unit.models_tiny import tiny_model


def recipe(**optimizer: Any) -> Recipe:
    sections: dict[str, Any] = {
        "model": {"name": "x"},
        "data": {"train_path": "x"},
        "training": {"max_steps": 1, "learning_rate": 1e-3},
    }
    return from_mapping(Recipe, {**sections, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "adafactor", "betas": [0.9, 0.99]}, "betas: has no effect with name: adafactor; leave it out, or set name"),
        ({"name": "lion", "eps": 1e-8}, "eps: has no effect with name: lion"),
        ({"name": "adamw", "momentum": 0.9}, "momentum: has no effect with name: adamw; leave it out, or set name: sgd or muon"),
        ({"name": "adamw", "adjust_lr": "original"}, "adjust_lr: has no effect"),
        ({"name": "muon", "precondition_frequency": 5}, "precondition_frequency: has no effect"),
        ({"name": "schedule_free_adamw", "betas": [0.0, 0.99]}, "betas: the first must be above 0"),
        ({"groups": [{"match": ["norm"], "name": "adamw"}]}, "groups[0].name: has no effect with name: adamw"),
        ({"groups": [{"match": []}]}, "groups[0].match"),
        ({"groups": [{"match": ["norm"], "lr_scale": -1}]}, "groups[0].lr_scale"),
        ({"name": "soaap"}, "did you mean soap"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)):
        from_mapping(OptimizerSection, settings)


def test_schedule_free_wants_no_falling_schedule() -> None:
    with pytest.raises(
        RecipeError, match="cosine lowers the learning rate, which schedule_free_adamw does by averaging"
    ):
        recipe(name="schedule_free_adamw")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("model", "freeze", ["lm_head"]), ("model", "trainable", ["lm_head"]), ("training", "offload", "optimizer")],
)
def test_what_megatron_fsdp_cannot_do_is_said(section: str, key: str, value: Any) -> None:
    sections: dict[str, Any] = {
        "model": {"name": "x"},
        "data": {"train_path": "x"},
        "training": {"max_steps": 1, "learning_rate": 1e-3},
        "distributed": {"strategy": "megatron_fsdp"},
    }
    from_mapping(Recipe, sections)
    with pytest.raises(RecipeError, match=rf"{section}\.{key}: .*megatron_fsdp"):
        from_mapping(Recipe, {**sections, section: {**sections[section], key: value}})


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("muon")
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    for name, extra in (("soap", "optimizers"), ("adamw_8bit", "torchao")):
        with pytest.raises(RecipeError, match=rf"optimizer.name: {name} needs a package .* 'meshtune\[{extra}\]'"):
            check_installed(name)
    check_installed("adafactor")


def test_the_first_group_that_matches_has_a_parameter_and_a_tied_one_goes_by_any_name() -> None:
    model = tiny_model("llama-tied")
    groups = [
        {"match": ["layers.0.mlp"], "lr_scale": 0.5},
        {"match": ["layers.0", "lm_head"], "lr_scale": 0.1, "weight_decay": 0.3},
    ]
    section = from_mapping(OptimizerSection, {"weight_decay": 0.1, "groups": groups})
    rules = assign(section.groups, tensor_names(model))
    optimizer = section.build(model.named_modules(), 1e-3, Known(rules))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr_scale"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.1)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (0.1, 0.3)
    assert found["model.layers.0.input_layernorm.weight"] == (0.1, 0.3)  # named by the group: it decays
    assert found["model.embed_tokens.weight"] == (0.1, 0.3)
    assert found["model.layers.1.input_layernorm.weight"] == (1.0, 0.0)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1.0, 0.1)


@pytest.mark.parametrize(
    ("matches", "says"),
    [
        ([["layer.0"]], "optimizer.groups[0].match: 'layer.0' matches no parameter that is trained; did you mean layers.*"),
        ([["mlp"], ["norm", "lm_heads"]], "optimizer.groups[1].match: 'lm_heads' matches no parameter"),
        ([["layers.0"], ["layers.0.mlp"]], "optimizer.groups[1]: all that it matches belongs to groups before it"),
    ],
)  # fmt: skip
def test_a_group_that_has_nothing_is_an_error(matches: list[list[str]], says: str) -> None:
    groups = [GroupSection(match=match) for match in matches]
    with pytest.raises(RecipeError, match=re.escape(says)):
        assign(groups, tensor_names(tiny_model("llama")))


def test_muon_gets_hidden_matrices_and_adamw_the_rest() -> None:
    model = tiny_model("qwen3_moe")
    asked = recipe(name="muon", groups=[{"match": ["mlp.gate"], "name": "adamw"}])
    learning = optimizing.choose(asked, model, None)
    by_part: dict[str, set[str]] = {}
    for name, part in learning.parts.items():
        by_part.setdefault(part, set()).add(re.sub(r".*layers\.\d+\.", "", name))
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert by_part["muon"] == {f"self_attn.{part}_proj.weight" for part in "qkvo"} | experts
    assert {"mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight", "self_attn.q_norm.weight"} < by_part[
        "adamw"
    ]
    assert learning.lines[0].startswith("optimizer   muon: ") and learning.lines[1].startswith("optimizer   adamw: ")
    with pytest.raises(RecipeError, match=r"model.norm.weight has 1 dimensions; muon needs matrices"):
        optimizing.choose(recipe(name="muon", groups=[{"match": ["model.norm"], "name": "muon"}]), model, None)


def test_keys_of_the_part_of_muon_that_has_nothing_are_named() -> None:
    """Of an adapter of linear layers all is muon's; of groups that say so all is adamw's."""
    model = tiny_model("llama")
    matrices = find_trained(model, lambda name: "proj" in name)
    optimizing.choose(recipe(name="muon", momentum=0.9), model, matrices)
    with pytest.raises(RecipeError, match=r"optimizer.betas: has no effect: muon takes all that is trained"):
        optimizing.choose(recipe(name="muon", betas=[0.9, 0.99]), model, matrices)
    groups = [{"match": ["*"], "name": "adamw"}]
    with pytest.raises(RecipeError, match=r"optimizer.momentum: has no effect: adamw takes all that is trained"):
        optimizing.choose(recipe(name="muon", momentum=0.9, groups=groups), model, None)


def test_muon_asks_what_is_hidden() -> None:
    """Else a caller would get AdamW for everything, and not know it."""
    with pytest.raises(ModelError, match="has to say which these are"):
        OptimizerSection(name="muon").build(nn.Linear(4, 4).named_modules(), 1e-3)


def test_lora_plus_rates_are_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"], use_dora=False)
    model = get_peft_model(tiny_model("llama"), config)
    theirs = create_loraplus_optimizer(
        model, torch.optim.SGD, lr=1e-2, loraplus_lr_ratio=4.0, loraplus_lr_embedding=1e-4
    )
    wanted = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    dimensions = {name: p.ndim for name, p in model.named_parameters() if p.requires_grad}
    rules = faster_b({}, dimensions, 4.0, 1e-4 / 1e-2)
    optimizer = OptimizerSection(name="sgd").build(model.named_modules(), 1e-2, Known(rules))
    found = {id(p): 1e-2 * group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert found == pytest.approx(wanted)
    assert len(set(wanted.values())) == 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.linear = nn.Linear(64, 128)
        self.stack = nn.Parameter(torch.randn(3, 64, 32))


@pytest.mark.parametrize("name", [*METHODS])
def test_the_space_for_a_state_is_foreseen(name: str) -> None:
    """The tensors that are kept after two steps have about as many bytes as was said before."""
    model = Net()
    parts = {n: "muon" if "embedding" not in n and p.ndim > 1 else "adamw" for n, p in model.named_parameters()}
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = OptimizerSection(name=name, **momentum).build(
        model.named_modules(), 1e-3, Known(parts=parts if name == "muon" else {})
    )
    foreseen = sum(state_bytes(optimizer, p, tuple(p.shape), p.element_size()) for p in model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    held = sum(entry.tensor.nbytes for entry in kept(optimizer) if entry.tensor.ndim and "step" not in entry.key)
    if name == "schedule_free_adamw":
        held += sum(p.nbytes for p in model.parameters())  # the weights of training, beside the average
    assert foreseen == pytest.approx(held, rel=0.02)


def test_frozen_and_trainable_are_sections_of_the_model() -> None:
    section = from_mapping(ModelSection, {"name": "x", "trainable": ["layers.1"], "freeze": "lm_head.weight"})
    assert section.trainable == ["layers.1"] and section.freeze == "lm_head.weight"
