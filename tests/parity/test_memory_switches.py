"""What keeps less on the device changes time and memory, never a number.

The device here is the CPU, where these switches are refused, as they move what is there already; so the refusal is taken
away, and copies are copies all the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.layout import Layout
from meshtune.optim.rounding import Position
from meshtune.optim.slices import Rounding, Sliced
from meshtune.recipes import memory
from meshtune.recipes.recipe import Recipe
from tests.parity.conftest import Bench
from tests.parity.meshes import PP, SP, WEIGHTS, split
from tests.parity.runs import check_course, course, train


def train_offloaded(recipe: dict[str, Any], cache: str) -> tuple[int, int]:
    """Bytes that went to the memory of the CPU, and what of them were weights."""
    moved = [0, 0]

    class Watched:
        def __init__(self, pin_memory: bool, device_type: str):
            from torch.autograd.graph import save_on_cpu

            theirs = save_on_cpu(pin_memory=pin_memory, device_type=device_type)

            def pack(tensor: Tensor) -> Any:
                moved[0] += tensor.nbytes
                moved[1] += tensor.nbytes * (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter))
                return theirs.pack_hook(tensor)

            self.pack_hook, self.unpack_hook = pack, theirs.unpack_hook

    with (
        patch("meshtune.recipes.memory._on_device", return_value=()),
        patch("meshtune.parallel.activation_checkpointing.save_on_cpu", Watched),
    ):
        train(recipe, cache)
    return moved[0], moved[1]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ({"dp_shard": 2}, {}),
        ({**PP, "dp_shard": 1}, {"activation_checkpointing": "full", "activation_checkpointing_every": 2}),
        (SP, {"activation_checkpointing": "selective", "activation_checkpointing_keep": ["attention"]}),
    ],
    ids=["fsdp2-none", "pp2-every-second", "tp2+sp-attention"],
)
def test_offloaded_activations_come_back(bench: Bench, layout: dict[str, Any], mode: dict[str, Any]) -> None:
    section, world_size, readers = split(layout)
    training = {"activation_offload": True, "per_device_batch_size": 12 // readers // 3, **mode}
    recipe = bench.recipe(bench.model("qwen3"), True, distributed=section, training=training)
    del recipe["data"]["validation_path"]
    for moved, weights in bench.ranks.call(world_size, train_offloaded, recipe, bench.cache):
        assert moved > 100_000 and weights == 0
    check_course(course(recipe), bench.plain("qwen3", True).without_validation(), WEIGHTS)


def train_unrefused(recipe: dict[str, Any], cache: str) -> dict[str, str]:
    with patch("meshtune.recipes.memory._on_device", return_value=()):
        return train(recipe, cache)


@pytest.mark.parametrize(
    ("offload", "layout"),
    [("parameters", {"ep_size": 2, "dp_shard": 2}), ("parameters", {}), ("optimizer", {"dp_shard": 2})],
    ids=["parameters-ep2", "parameters-one", "optimizer-fsdp2"],
)
def test_offloaded_weights_and_moments_train_as_a_plain_loop(
    bench: Bench, offload: str, layout: dict[str, Any]
) -> None:
    section, world_size, readers = split(layout)
    training = {"offload": offload, "per_device_batch_size": 12 // readers // 3}
    recipe = bench.recipe(bench.model("qwen3_moe"), True, distributed=section, training=training)
    del recipe["data"]["validation_path"]
    bench.ranks.call(world_size, train_unrefused, recipe, bench.cache)
    check_course(course(recipe), bench.plain("qwen3_moe", True).without_validation(), WEIGHTS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves between an accelerator and the CPU")
@pytest.mark.parametrize("kind", [None, "kahan", "stochastic"])
def test_moments_wait_in_the_memory_of_the_cpu(kind: Any) -> None:
    start = torch.randn(70, 30, device="cuda", dtype=torch.bfloat16 if kind else torch.float32)
    box = SimpleNamespace(start=(0, 0), local=(0, 0), shape=(70, 30))
    found = []
    for home in (None, "cpu"):
        parameter = nn.Parameter(start.clone())
        rounding = Rounding(kind, 1, {parameter: Position("w", (70, 30), [box])}) if kind else None
        optimizer = Sliced(torch.optim.AdamW([parameter], lr=1e-3, fused=True), rounding, home)
        for step in range(3):
            torch.manual_seed(step)
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        state = optimizer.state[parameter]
        assert {state[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {home or "cuda"}
        found.append([parameter.detach().cpu(), *(state[key].cpu() for key in sorted(state))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("key", ["activation_offload", "offload"])
def test_on_the_cpu_they_are_refused(bench: Bench, key: str) -> None:
    recipe = bench.recipe(bench.model("llama"), training={key: True if key == "activation_offload" else "parameters"})
    with pytest.raises(RecipeError, match=rf"training\.{key}: .*no accelerator"):
        bench.ranks.call(1, train, recipe, bench.cache)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {"in_backward": True}}, r"optimizer\.in_backward: beside offload: parameters .* torch 2.13"),
        ({"distributed": {"dp_replicate_size": 2}}, r"training\.offload: parameters beside dp_replicate_size"),
    ],
    ids=["in_backward", "hsdp"],
)
def test_an_older_torch_whose_copies_are_read_too_early_is_refused(changes: dict[str, Any], says: str) -> None:
    sections = {
        "model": {"name": "x"},
        "data": {"train_path": "x"},
        "training": {"max_steps": 1, "learning_rate": 1e-3, "offload": "parameters", "max_grad_norm": None},
    }
    recipe = from_mapping(Recipe, {**sections, **changes})
    layout = Layout.resolve(recipe.distributed, 4, "cuda")
    memory.check(recipe, layout, "cuda", 1)
    with patch("meshtune.recipes.memory._waits_for_copies", return_value=False), pytest.raises(RecipeError, match=says):
        memory.check(recipe, layout, "cuda", 1)
