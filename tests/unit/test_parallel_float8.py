"""Which layers compute in float8, what is said of the others, and what is refused before a weight is read."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from meshtune.config import from_mapping
from meshtune.errors import MeshtuneError, ModelError, RecipeError
from meshtune.layout import DistributedSection, Layout, Plan
from meshtune.layout.pieces import Cut
from meshtune.parallel.float8 import Float8, choose, problems, swap
from meshtune.recipes import precision
from meshtune.recipes.recipe import Recipe

CPU = torch.device("cpu")


class Mixer(nn.Module):
    def __init__(self, odd: int = 16) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 64), nn.Linear(64, 32)
        self.router = nn.Linear(32, 48, bias=False)
        self.odd = nn.Linear(32, odd)
        self.experts = nn.Bilinear(32, 4, 8)


class Model(nn.Module):
    def __init__(self, odd: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(odd), Mixer(odd)])
        self.lm_head = nn.Linear(32, 128)


def model(odd: int = 24) -> nn.Module:
    with torch.device("meta"):
        return Model(odd)


PLAN = Plan(units=("layers.0", "layers.1"))


def layout(tp: int = 1) -> Layout:
    return Layout.resolve(DistributedSection(tp_size=tp), tp)


def test_linear_layers_of_blocks_are_chosen_and_the_others_counted() -> None:
    found = choose(Float8(), model(), PLAN, layout(), experts=48)
    assert found.names == {f"layers.{n}.{name}" for n in (0, 1) for name in ("q_proj", "o_proj")}
    assert found.left_out == {
        "routers": 2,
        "of sizes that are no multiples of 16": 2,
        "of class Bilinear": 2,
    }
    assert found.summary().startswith("4 linear layers by torchao tensorwise; left out: 2 routers, ")


def test_names_are_those_of_the_model_without_its_adapter() -> None:
    """A layer inside an adapter's wrapper is chosen by its bare name; the adapter's own layers are not the model's."""
    wrapped = model(16)
    for layer in wrapped.layers:
        layer.q_proj = nn.ModuleDict({"base_layer": layer.q_proj, "lora_A": nn.Linear(32, 16, device="meta")})
    bare = {path: path.replace(".base_layer", "") for path, _ in wrapped.named_modules() if "lora_A" not in path}
    found = choose(Float8(), wrapped, PLAN, layout(), exclude=["o_proj", "layers.1"], bare=bare, experts=48)
    assert found.names == {"layers.0.q_proj.base_layer", "layers.0.odd"}
    assert found.left_out["excluded"] == 6  # o_proj, and all of the second block


@pytest.mark.parametrize(("tp", "chosen"), [(1, True), (2, True), (4, False)])
def test_sizes_count_as_tensor_parallelism_leaves_them(tp: int, chosen: bool) -> None:
    """32 rows are 16 on each of two ranks, and 8 on each of four."""
    cuts = {f"layers.{n}.o_proj.weight": Cut("tp", 0, (32,)) for n in (0, 1)}
    found = choose(Float8(), model(), Plan(units=PLAN.units, cuts=cuts), layout(tp))
    assert ("layers.0.o_proj" in found.names) is chosen


def test_patterns_that_match_nothing_and_nothing_left_are_errors() -> None:
    with pytest.raises(ModelError, match=r"training.fp8.exclude_modules: 'q_poj'.*did you mean q_proj"):
        choose(Float8(), model(), PLAN, layout(), exclude=["lm_head", "q_poj"])
    with pytest.raises(ModelError, match=r"no layer is left to compute in fp8 \(.*; write bf16"):
        choose(Float8(), model(), PLAN, layout(), exclude=[r"*_proj", "router", "odd"])


def test_only_chosen_layers_are_swapped_with_their_weights_as_they_are() -> None:
    whole = model()
    weight = whole.layers[0].q_proj.weight
    swap(whole, choose(Float8(emulate=True), whole, PLAN, layout(), exclude=["o_proj"], experts=48))
    kinds = {path: type(module).__name__ for path, module in whole.named_modules()}
    assert {path for path, kind in kinds.items() if kind == "Float8Linear"} == {"layers.0.q_proj", "layers.1.q_proj"}
    assert whole.layers[0].q_proj.weight is weight


def test_what_keeps_float8_from_running_is_said() -> None:
    assert not list(problems("torchao", "tensorwise", None, CPU))
    (hardware,) = problems("torchao", "tensorwise", False, CPU)
    assert hardware[0] == "training.precision" and "leave fp8.emulate out" in hardware[1]
    with patch("meshtune.parallel.float8.importlib.util.find_spec", lambda name: None):
        (missing,) = problems("torchao", "tensorwise", None, CPU)
    assert "pip install 'meshtune[torchao]'" in missing[1]
    told = dict(problems("transformer_engine", "tensorwise", None, CPU))
    assert "NVIDIA" in told["training.fp8.backend"]
    (apple,) = problems("torchao", "tensorwise", None, torch.device("mps"))
    assert "write fp16 or fp32" in apple[1]


def recipe(training: dict[str, Any], **sections: Any) -> Recipe:
    values = {"model": {"name": "x"}, "data": {"train_path": "x.jsonl"}, **sections}
    return from_mapping(Recipe, {**values, "training": {"learning_rate": 1e-3, **training}})


@pytest.mark.parametrize(
    ("training", "sections", "message"),
    [
        ({"precision": "bf16", "fp8": {}}, {}, "training.fp8.*write `precision: fp8`"),
        ({"precision": "fp8", "fp8": {"recipe": "rowwise", "all_gather": True}}, {}, "all_gather.*tensorwise"),
        ({"precision": "fp8", "fp8": {"all_gather": True}}, {"distributed": {"strategy": "ddp"}}, "gathers no weights"),
        ({"precision": "fp8", "fp8": {"backend": "transformer_engine", "emulate": True}}, {}, "emulate.*torchao's"),
        (
            {"precision": "fp8"},
            {"distributed": {"strategy": "megatron_fsdp"}},
            "megatron_fsdp; write `strategy: fsdp2`",
        ),
        (
            {"precision": "fp16"},
            {"distributed": {"strategy": "megatron_fsdp"}},
            "megatron_fsdp; write `strategy: fsdp2`",
        ),
        (
            {"precision": "fp16"},
            {"model": {"name": "x", "dtype": "bfloat16"}},
            "fp16 cannot be computed with weights held",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(training: dict[str, Any], sections: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(training, **sections)


def test_emulation_is_asked_for_or_where_there_is_no_hardware() -> None:
    assert precision.float8(recipe({"precision": "fp8"}), CPU).emulate
    precision.check(recipe({"precision": "fp8", "fp8": {"emulate": True}}), "cpu")
    with pytest.raises(MeshtuneError, match="has no hardware here"):
        precision.check(recipe({"precision": "fp8", "fp8": {"emulate": False}}), "cpu")
