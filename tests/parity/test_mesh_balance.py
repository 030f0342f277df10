"""C60: a load-balancing loss weighs the same on every mesh, and for every accumulation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.meshes import CP, PP, SP, TP, WEIGHTS, split
from tests.parity.reference import Course
from tests.parity.runs import check_course, records

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one in six": ({}, 6),
    "ddp2": ({"strategy": "ddp", "dp_shard": 2}, 3),
    "ep2": ({"ep_size": 2, "dp_shard": 2}, 2),
    "tp2": (TP, 3),
    "tp2+sp": (SP, 1),
    "cp2": (CP, 2),
    "pp2": (PP, 3),
    "pp2xep2": ({**PP, "ep_size": 2, "dp_shard": 2}, 2),
}


def run(bench: Bench, layout: dict[str, Any], accumulation: int, coefficient: float) -> tuple[Course, list[float]]:
    """The course, and the value of balance at each step."""
    section, world_size, readers = split(layout)
    settings = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    model = bench.model("mixtral", f"balanced-{coefficient}", **settings)
    training = {"per_device_batch_size": GLOBAL_BATCH // readers // accumulation}
    recipe = bench.recipe(model, True, distributed=section, training=training)
    course, _ = bench.run(world_size, recipe)
    return course, [record.get("router_aux_loss", 0.0) for record in records(recipe, "loss")]


@pytest.fixture(scope="module")
def one(bench: Bench) -> tuple[Course, list[float]]:
    """One process, one micro-batch."""
    return run(bench, {}, 1, 0.5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_balance_is_that_of_one_process(bench: Bench, one: tuple[Course, list[float]], name: str) -> None:
    found, balance = run(bench, *LAYOUTS[name], 0.5)
    check_course(found, one[0], WEIGHTS)
    assert all(balance) and balance == pytest.approx(one[1], rel=1e-5)


def test_its_coefficient_moves_the_weights_of_routers(bench: Bench, one: tuple[Course, list[float]]) -> None:
    without, _ = run(bench, {}, 1, 0.0)
    assert without.loss[0] == pytest.approx(one[0].loss[0], rel=1e-6)
    router = next(name for name in without.weights if name.endswith("gate.weight"))
    difference = (without.weights[router] - one[0].weights[router]).norm() / without.weights[router].norm()
    assert difference > 1e-3
