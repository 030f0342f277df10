"""Experts are found by structure, and what is kept in another way is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshtune.errors import LayoutError, ModelError
from meshtune.layout.experts import problems
from meshtune.models.experts import experts_modules
from tests.unit.models_tiny import tiny_model

STACKED = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "first", "modules", "parameters"),
    [
        ("mixtral", "model.layers.0.mlp.experts", 2, STACKED),
        ("qwen2_moe", "model.layers.0.mlp.experts", 2, STACKED),
        ("deepseek_v3", "model.layers.1.mlp.experts", 1, STACKED),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts",
            2,
            ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
        ),
    ],
)
def test_experts_of_any_family_are_found_by_their_structure(
    name: str, first: str, modules: int, parameters: tuple[str, ...]
) -> None:
    found = experts_modules(tiny_model(name))
    assert len(found) == modules
    assert found[0].path == first
    assert (found[0].count, found[0].counters) == (4, ("num_experts",))
    assert sorted(found[0].parameters) == sorted(parameters)


def test_a_dense_model_has_none() -> None:
    assert experts_modules(tiny_model("qwen3")) == []


def test_a_width_that_equals_the_number_of_experts_is_not_taken_for_it() -> None:
    found = experts_modules(tiny_model("mixtral", hidden_size=4, head_dim=4, num_local_experts=4))
    assert all(experts.counters == ("num_experts",) for experts in found)


class Routed(nn.Module):
    """Experts as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.zeros(4, 6, 6))
        self.down = nn.Parameter(torch.zeros(4, 6, 6))

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden_states


class Everywhere(Routed):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


class Biased(Everywhere):
    """Rows of zeros would not give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 6))


class Unweighted(Routed):
    def forward(self, hidden_states: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


class WithNorm(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)


class Uneven(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(6, 6, 6))


class SharedByAll(Everywhere):
    """Experts that every token visits are no matter of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.n_shared_experts = self.num_experts
        del self.num_experts


def test_structure_decides() -> None:
    assert [experts.path for experts in experts_modules(nn.Sequential(Routed(), SharedByAll()))] == ["0"]
    assert [experts.by_rows for experts in experts_modules(nn.Sequential(Routed(), Everywhere()))] == [False, True]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Biased(), r"is called with \(hidden_states\)"),
        (Unweighted(), r"is called with \(hidden_states, index\)"),
        (WithNorm(), r"parameters that its experts share \(norm\)"),
        (Uneven(), "do not all count the same experts"),
    ],
)
def test_experts_kept_in_another_way_are_refused_by_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"0 \({type(module).__name__}\) .*{reason}.*ep_size: 1"):
        experts_modules(nn.Sequential(module))


def test_a_list_of_expert_modules_is_refused_by_name() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    with pytest.raises(ModelError, match="experts is a list of 2 modules"):
        experts_modules(model)


def test_experts_that_do_not_divide_are_refused_with_numbers() -> None:
    found = experts_modules(tiny_model("mixtral", num_local_experts=6))
    assert list(problems(found, 2)) == []
    (problem,) = problems(found, 4)
    assert "6 experts" in problem and "4 ranks" in problem and "1, 2, 3, 6" in problem
    with pytest.raises(LayoutError, match="1, 2, 3, 6"):
        found[0].share(4)
