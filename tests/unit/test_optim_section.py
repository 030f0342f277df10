"""The optimizer section: what it refuses, and the optimizer that it builds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshtune.config import from_mapping
from meshtune.errors import ModelError, RecipeError
from meshtune.optim.parameter_groups import parameter_groups
from meshtune.optim.section import OptimizerSection


class RMSNorm2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 3, 3))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.other_norm = RMSNorm2d()
        self.experts = Experts()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def test_decay_leaves_out_biases_and_normalisation_and_counts_tied_weights_once() -> None:
    model = Model()
    groups = parameter_groups(model.named_modules(), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in groups}
    assert found == {
        0.1: ["sinks", "embedding.weight", "experts.gate_up_proj"],
        0.0: [
            "norm.weight",
            "norm.bias",
            "other_norm.weight",
            "experts.gate_up_proj_bias",
            "head.bias",
        ],
    }


def test_weight_decay_zero_is_honoured() -> None:
    """C44: 0 is a value; no default takes its place."""
    (group,) = OptimizerSection(weight_decay=0.0).build(Model().named_modules(), 1e-3).param_groups
    assert group["weight_decay"] == 0.0


def test_a_model_that_is_all_frozen_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        parameter_groups(Model().requires_grad_(False).named_modules(), 0.1)


def test_defaults_and_settings_reach_the_optimizer() -> None:
    modules = Model().named_modules
    default = OptimizerSection().build(modules(), 1e-3)
    assert isinstance(default, torch.optim.AdamW)
    assert default.defaults["betas"] == (0.9, 0.999) and default.defaults["eps"] == 1e-8
    assert default.defaults["lr"] == 1e-3 and default.defaults["fused"] is True
    adamw = from_mapping(OptimizerSection, {"betas": [0.0, 0.95], "eps": 0}).build(modules(), 1e-3)
    assert adamw.defaults["betas"] == (0.0, 0.95) and adamw.defaults["eps"] == 0
    sgd = OptimizerSection(name="sgd", momentum=0.9, nesterov=True).build(modules(), 0.5)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.9 and sgd.defaults["nesterov"] is True


def test_devices_without_a_fused_kernel_get_torchs_own_choice() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert OptimizerSection().build(model.named_modules(), 1e-3).defaults["fused"] is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"name": "sgd", "betas": [0.9, 0.99]}, "betas"),
        ({"name": "sgd", "eps": 1e-8}, "eps"),
        ({"momentum": 0.0}, "momentum"),
        ({"nesterov": False}, "nesterov"),
        ({"name": "sgd", "nesterov": True}, "nesterov"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"betas": [-0.1, 0.9]}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"name": "adam"}, "name"),
    ],
)
def test_settings_without_effect_or_out_of_range_are_named(settings: dict[str, object], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        from_mapping(OptimizerSection, settings)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fp32_weights_move_by_small_steps_and_small_decay(name: str) -> None:
    """C46: 100 updates of 1e-3 give 0.9, and 1000 steps of decay factor 1-1e-5 give 0.99005."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = OptimizerSection(name=name).build(model.named_modules(), 1e-3)
    for _ in range(100):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert model.weight.item() == pytest.approx(0.9, abs=1e-5)
    model.weight.data.fill_(1.0)
    optimizer = OptimizerSection(name=name, weight_decay=0.01).build(model.named_modules(), 1e-3)
    for _ in range(1000):
        model.weight.grad = torch.zeros(1, 1)
        optimizer.step()
    assert model.weight.item() == pytest.approx(0.99005, abs=2e-5)
