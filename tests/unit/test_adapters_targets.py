"""Which layers an adapter is for: every pattern says something; what PEFT passes over in silence is an error (C77, C81)."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from meshtune.errors import RecipeError
from meshtune.models import hf
from meshtune.models.adapters.facts import facts_of
from meshtune.models.adapters.inject import config_of, inject
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.adapters.targets import Facts, Targets, find_targets, shortest
from meshtune.models.adapters.view import base_view
from meshtune.models.blocks import generic
from tests.unit.models_tiny import tiny_source

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
FEED_FORWARD = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def bare(architecture: str) -> PreTrainedModel:
    return hf.build(tiny_source(architecture), "eager")


def found(model: PreTrainedModel, facts: Facts | None = None, **settings: Any) -> Targets:
    return find_targets(AdapterSection(**settings), model, facts or Facts())


def kinds(names: tuple[str, ...]) -> set[str]:
    return {generic(name).removeprefix("model.layers.*.") for name in names}


@pytest.mark.parametrize(
    ("architecture", "settings", "modules", "parameters"),
    [
        ("llama", {}, ATTENTION | FEED_FORWARD, set()),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["mlp.*"]}, ATTENTION, set()),
        ("llama", {"target_modules": ["q_proj", "mlp.*"]}, {"self_attn.q_proj"} | FEED_FORWARD, set()),
        ("llama", {"target_modules": r"model\.layers\.0\..*_proj"}, ATTENTION | FEED_FORWARD, set()),
        ("llama", {"target_modules": ["embed_tokens", "lm_head"]}, {"model.embed_tokens", "lm_head"}, set()),
        ("qwen3_moe", {}, ATTENTION, set()),
        ("qwen3_moe", {"target_parameters": ["all-experts"]}, ATTENTION, set(EXPERTS)),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["*down_proj"]}, set(), {EXPERTS[1]}),
        ("qwen3_moe", {"target_parameters": ["mlp.gate.weight"]}, ATTENTION, {"mlp.gate.weight"}),
        ("gpt_oss", {"target_parameters": ["experts.down_proj"]}, ATTENTION, {EXPERTS[1]}),
        ("phi3", {}, {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}, set()),
    ],
)
def test_what_a_recipe_names(
    architecture: str, settings: dict[str, Any], modules: set[str], parameters: set[str]
) -> None:
    targets = found(bare(architecture), **settings)
    assert kinds(targets.modules) == modules
    assert kinds(targets.parameters) == parameters


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("llama", {"target_modules": ["q_proj", "qproj"]}, "peft.target_modules: 'qproj' matches nothing .*q_proj"),
        ("llama", {"target_modules": ["attention"]}, "'attention' matches nothing of the model"),
        (
            "llama",
            {"target_modules": ["self_attn"]},
            r"self_attn is a module with other modules in it \(LlamaAttention\)",
        ),
        ("llama", {"target_modules": ["norm"]}, r"model.norm is a LlamaRMSNorm; adapters are for linear layers"),
        ("llama", {"target_modules": "*q_proj"}, "'\\*q_proj' is not a regular expression"),
        ("llama", {"target_modules": []}, "no layer is left for an adapter"),
        (
            "llama",
            {"exclude_modules": ["lm_head"]},
            "peft.exclude_modules: 'lm_head' matches nothing of the layers that have",
        ),
        ("llama", {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.*"]}, "leaves no layer of those"),
        ("llama", {"rank_pattern": {"qproj": 4}}, "peft.rank_pattern: 'qproj' matches none of the layers"),
        ("llama", {"alpha_pattern": {"(q": 4.0}}, "peft.alpha_pattern: '\\(q' is not a regular expression"),
        ("llama", {"modules_to_save": ["nrm"]}, "peft.modules_to_save: 'nrm' matches nothing"),
        ("llama", {"modules_to_save": ["rotary_emb"]}, "model.rotary_emb has no parameter"),
        (
            "llama",
            {"target_modules": ["q_proj"], "modules_to_save": ["layers.0.self_attn"]},
            r"layers.\*.self_attn.q_proj is trained whole by modules_to_save",
        ),
        ("llama", {"target_parameters": ["all-experts"]}, "LlamaForCausalLM has no stacked experts"),
        (
            "llama",
            {"target_parameters": ["o_proj.weight"]},
            "is the weight of a layer; name model.layers.0.self_attn.o_proj",
        ),
        ("llama", {"target_parameters": ["norm.weight"]}, "is no matrix, nor a stack of them"),
        ("qwen3_moe", {"target_modules": ["down_proj"]}, "'down_proj' matches nothing of the model"),
        (
            "qwen3_moe",
            {"target_modules": ["experts"]},
            "no linear layer; name its weights in target_parameters: .*gate_up_proj",
        ),
        ("gpt_oss", {"target_parameters": ["down_proj_bias"]}, "is no matrix, nor a stack of them"),
    ],
)
def test_what_names_nothing_or_the_wrong_thing_is_refused(
    architecture: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        found(bare(architecture), **settings)


def test_modules_to_save_are_those_alone_that_are_named() -> None:
    """PEFT takes `norm` for the end of any name, and would train every `..._norm` and `...norm`."""
    targets = found(bare("llama"), target_modules=["q_proj"], modules_to_save=["norm"])
    assert targets.saved == ("model.norm",)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        found(bare("llama"), target_modules=["wrong", "norm"], modules_to_save=["lost"], exclude_modules=["gone"])
    assert len(error.value.problems) == 4


def test_layers_of_which_an_adapter_would_be_another_thing() -> None:
    """Never called (C77: it would be a no-op), no matrix product, or read by PEFT as experts of an older form."""
    mamba, source = bare("mamba"), tiny_source("mamba")
    facts = facts_of(source, mamba)
    assert facts.unused == {"backbone.layers.*.mixer.dt_proj"}
    targets = found(mamba, facts)
    assert kinds(targets.modules) == {f"backbone.layers.*.mixer.{name}_proj" for name in ("in", "x")}
    assert "dt_proj" in "".join(targets.notes)
    assert "out_proj" in "".join(targets.notes)
    with pytest.raises(RecipeError, match="dt_proj is never called in a forward of the model"):
        found(mamba, facts, target_modules=["dt_proj"])
    deep = bare("deepseek_v3")
    targets = found(deep, facts := facts_of(tiny_source("deepseek_v3"), deep))
    assert not any("mlp" in name for name in targets.modules)
    with pytest.raises(RecipeError, match=r"shared_experts.down_proj has a name that PEFT reads as that of experts"):
        found(deep, facts, target_modules=["shared_experts.down_proj"])


def test_a_layer_with_a_forward_of_its_own_is_run() -> None:
    import torch
    from torch import nn

    from meshtune.models.adapters.facts import _nonlinear

    class Halves(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.cat([super(Halves, self).forward(part) for part in input.chunk(2, -2)], -1)

    class Named(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    with torch.device("meta"):
        layers = {"halves": Halves(4, 6), "named": Named(4, 6), "plain": nn.Linear(4, 6)}
    assert list(_nonlinear(layers)) == ["halves"]


def test_names_are_as_short_as_they_can_be() -> None:
    names = ["a.0.q", "a.1.q", "a.0.k", "b.k", "b.v"]
    assert shortest(["a.0.q", "a.1.q", "a.0.k"], names) == ["q", "a.0.k"]


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "gpt_oss"])
def test_a_model_with_an_adapter_is_seen_without_it(architecture: str) -> None:
    """Names, tensors and ties of the bare model, and nothing but the adapter requires a value of its own."""
    model = bare(architecture)
    names, ties = list(model.state_dict()), dict(model.all_tied_weights_keys)
    section = AdapterSection(r=2, target_parameters=["all-experts"] if architecture == "gpt_oss" else None)
    config = config_of(section, find_targets(section, model, Facts()), model)
    adapter = inject(model, section, config)
    view = base_view(model)
    assert list(view.state_dict()) == names
    assert list(model.state_dict()) != names
    view.tie_weights()
    assert all(view.get_parameter(a) is view.get_parameter(b) for a, b in ties.items())
    own = {id(parameter) for parameter in view.parameters()}
    outside = {name for name, parameter in model.named_parameters() if id(parameter) not in own}
    assert outside == set(adapter.tensors) == adapter.trained
    assert all(model.get_submodule(inner) is view.get_submodule(path) for path, inner in adapter.inner.items())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
