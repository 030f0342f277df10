"""bf16 compute (C46): numbers within its rounding, weights that are held and updated in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.conftest import Bench
from tests.parity.reference import Course, Hyperparameters, train_plainly
from tests.parity.runs import TOLERANCE, check_course, exported_weights

# Far below half a unit of bf16's rounding of a weight of 0.15: a bf16 weight would not move.
LEARNING_RATE = 1e-5


def movement(course: Course, start: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(course.weights[name] - weight).flatten() for name, weight in start.items()])


@pytest.mark.parametrize(
    ("world_size", "distributed", "architecture", "packed"),
    [
        (1, {}, "qwen3", True),
        (2, {"strategy": "fsdp2"}, "llama", False),
        (2, {"strategy": "ddp"}, "llama", False),
        (2, {"strategy": "fsdp2"}, "gemma2", True),
        (2, {"strategy": "ddp"}, "mixtral", True),
        (4, {"dp_replicate_size": 2}, "gpt2", False),
    ],
    ids=lambda value: value.get("strategy", "hsdp" if value else "") if isinstance(value, dict) else None,
)
def test_bf16_computes_and_float32_keeps(
    bench: Bench, world_size: int, distributed: dict[str, Any], architecture: str, packed: bool
) -> None:
    """Losses to 1e-2 of those in float32, and updates that bf16 weights would lose."""
    recipe = bench.recipe(
        bench.model(architecture),
        packed,
        distributed=distributed,
        training={"precision": "bf16", "learning_rate": LEARNING_RATE, "per_device_batch_size": 3},
    )
    found, digests = bench.run(world_size, recipe)
    wanted = bench.plain(architecture, packed, learning_rate=LEARNING_RATE)
    start = exported_weights(bench.model(architecture))
    moved, should_move = movement(found, start), movement(wanted, start)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-2)
    assert found.loss != pytest.approx(wanted.loss, rel=TOLERANCE)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=3e-2)
    assert found.validation_loss == pytest.approx(wanted.validation_loss, rel=1e-2)
    assert (moved - should_move).norm() < 0.2 * should_move.norm()
    assert all(digest.startswith("torch.float32") for rank in digests for digest in rank.values())


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_bf16_checkpoint_trains_in_float32(bench: Bench, packed: bool) -> None:
    """`model.dtype: auto`: its weights are held in float32, and exported in its own dtype (C74)."""
    folder = bench.model("llama", "bf16", dtype=torch.bfloat16)
    wanted = train_plainly(folder, bench.windows(packed), Hyperparameters(), bench.rows("validation"))
    found, digests = bench.run(2, bench.recipe(folder, packed, training={"per_device_batch_size": 2}))
    assert all(digest.startswith("torch.float32") for rank in digests for digest in rank.values())
    rounded = {name: weight.bfloat16().float() for name, weight in wanted.weights.items()}
    check_course(replace(found, weights={}), replace(wanted, weights={}))
    for name, weight in rounded.items():
        different = found.weights[name] != weight
        assert different.float().mean() < 1e-2, name
        torch.testing.assert_close(found.weights[name], weight, rtol=2**-7, atol=1e-6)
