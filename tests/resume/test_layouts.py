"""A checkpoint belongs to no layout: a run goes on with other ranks and other strategies, on the same course."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.conversations import make_conversations, write_jsonl
from tests.resume.conftest import Bench
from tests.resume.runs import checkpoint, lines, losses, tensors

STEPS = 10
# World size, distributed section, and the step to stop after.
JOURNEY: list[tuple[int, dict[str, Any], int | None]] = [
    (2, {"strategy": "fsdp2"}, 3),
    (1, {"strategy": "fsdp2"}, 5),
    (4, {"strategy": "fsdp2", "dp_replicate_size": 2}, 7),
    (2, {"strategy": "ddp"}, None),
]


def travel(bench: Bench, recipe: dict[str, Any], journey: list[tuple[int, dict[str, Any], int | None]]) -> Path:
    for world_size, distributed, stop in journey:
        outcome = bench.train({**recipe, "distributed": distributed}, world_size, stop)
        assert outcome.error is None
        assert outcome.stopped_after == stop
    return Path(recipe["checkpoint"]["dir"])


@pytest.mark.parametrize(("architecture", "packing"), [("qwen3", False), ("qwen3_moe", True)])
def test_one_course_over_four_layouts(bench: Bench, architecture: str, packing: bool) -> None:
    """C69: 2 ranks, then 1, then 4 hybrid, then 2 with DDP; weights and moments agree too, and no row is seen twice."""
    model, changes = bench.model(architecture), {"data": {"packing": packing}}
    found = travel(bench, bench.recipe(model, **changes), JOURNEY)
    wanted = travel(bench, bench.recipe(model, **changes), [(1, {}, None)])
    assert [row["step"] for row in lines(found)] == list(range(1, STEPS + 1))
    for row, reference in zip(lines(found), lines(wanted), strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert (row["tokens"], row["learning_rate"]) == (reference["tokens"], reference["learning_rate"])
    state, whole = tensors(checkpoint(found, STEPS)), tensors(checkpoint(wanted, STEPS))
    assert state.keys() == whole.keys()
    for name, tensor in whole.items():
        # Adam divides by the root of its second moment, which enlarges rounding where gradients are next to nothing.
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_fewer_rows_than_ranks(bench: Bench, tmp_path: Path) -> None:
    """C24: ranks without a row go through the step with nothing that counts."""
    data = write_jsonl(tmp_path / "three.jsonl", make_conversations(3, seed=3))
    recipes = [bench.recipe(bench.model("qwen3"), data={"train_path": str(data)}) for _ in range(2)]
    found, wanted = travel(bench, recipes[0], [(4, {}, None)]), travel(bench, recipes[1], [(1, {}, None)])
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    assert len(losses(found)) == STEPS


def test_the_derived_global_batch_stays(bench: Bench) -> None:
    """Two a rank on two ranks are four; on one rank they would be two, and another course: the four go on."""
    model, training = bench.model("llama"), {"global_batch_size": None, "per_device_batch_size": 2}
    found = travel(bench, bench.recipe(model, training=training), [(2, {}, 4), (1, {}, None)])
    wanted = travel(bench, bench.recipe(model, training={"global_batch_size": 4}), [(1, {}, None)])
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)


def test_it_is_said_where_a_derived_global_batch_does_not_fit(bench: Bench) -> None:
    recipe = bench.recipe(bench.model("llama"), training={"global_batch_size": None, "per_device_batch_size": 2})
    travel(bench, recipe, [(2, {}, 4)])
    outcome = bench.train(recipe, world_size=4)
    assert outcome.error is not None
    assert "global_batch_size: 4 cannot be shared out over per_device_batch_size 2 x 4" in outcome.error
