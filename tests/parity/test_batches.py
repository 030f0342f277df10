"""What must not depend on how a batch is cut: micro-batches, ranks, empty ranks, counters, the schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.parity.conftest import Bench
from tests.parity.reference import Hyperparameters, train_plainly
from tests.parity.runs import TOLERANCE, check_course, records

DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP: dict[str, Any] = {"strategy": "fsdp2"}
HSDP: dict[str, Any] = {"strategy": "fsdp2", "dp_replicate_size": 2}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [8, 4, 1])
def test_a_global_batch_of_8_may_be_cut_into_any_micro_batches(bench: Bench, size: int, packed: bool) -> None:
    """C36, C35: 8 x 1, 4 x 2 and 1 x 8 rows, with SGD and without clipping, which hide no factor of a gradient."""
    wanted = bench.plain("qwen3", packed, size=8, optimizer="sgd", learning_rate=0.01, max_grad_norm=math.inf)
    recipe = bench.recipe(
        bench.model("qwen3"),
        packed,
        training={
            "global_batch_size": 8,
            "per_device_batch_size": size,
            "learning_rate": 0.01,
            "max_grad_norm": None,
        },
    )
    recipe["optimizer"] = {"name": "sgd", "momentum": 0.9, "weight_decay": Hyperparameters().weight_decay}
    check_course(bench.run(1, recipe)[0], wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("distributed", [DDP, FSDP, HSDP], ids=["ddp", "fsdp2", "hsdp"])
def test_a_rank_without_rows_changes_nothing(bench: Bench, distributed: dict[str, Any], packed: bool) -> None:
    """C24: three rows, or packs, on four ranks train as they do in one process."""
    bench.add("three", [[("user", "ab"), ("assistant", "c" * length)] for length in (30, 22, 32)])
    windows = bench.windows(packed, 4, "three") * 3
    wanted = train_plainly(bench.model("qwen3_moe"), windows, Hyperparameters(), bench.rows("validation"))
    recipe = bench.recipe(
        bench.model("qwen3_moe"),
        packed,
        "three",
        distributed=distributed,
        training={"global_batch_size": 4, "per_device_batch_size": 1},
    )
    found, _ = bench.run(4, recipe)
    check_course(found, wanted)
    assert [record["tokens"] for record in records(recipe, "loss")] == [sum(len(row.ids) for row in windows[0])] * 3


@pytest.mark.parametrize(
    ("world_size", "distributed", "global_batch", "micro_batch"),
    [(1, FSDP, 1, 1), (1, FSDP, 4, 4), (1, FSDP, 4, 1), (2, DDP, 8, 1), (2, FSDP, 8, 4), (4, HSDP, 8, 2)],
)
def test_the_validation_loss_is_a_mean_over_tokens(
    bench: Bench, world_size: int, distributed: dict[str, Any], global_batch: int, micro_batch: int
) -> None:
    """C40: seven rows of unequal counts; eval batch 1, 2, 4, world 1, 2, 4, accumulation 1 and 4, fillers."""
    wanted = bench.plain("llama", packed=False).validation_loss[0]
    recipe = bench.recipe(
        bench.model("llama"),
        distributed=distributed,
        training={"global_batch_size": global_batch, "per_device_batch_size": micro_batch, "max_steps": 1},
    )
    bench.run(world_size, recipe)
    first = records(recipe, "validation_loss")[0]
    assert first["validation_loss"] == pytest.approx(wanted, rel=TOLERANCE)
    assert first["validation_tokens"] == sum(sum(row.supervised[1:]) for row in bench.rows("validation"))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("world_size", "distributed", "micro_batch"),
    [(1, FSDP, 2), (2, DDP, 4), (2, FSDP, 2), (4, FSDP, 1), (4, HSDP, 2)],
)
def test_tokens_are_counted_once(
    bench: Bench, world_size: int, distributed: dict[str, Any], micro_batch: int, packed: bool
) -> None:
    """C42: 8 rows of 16 tokens are 128 tokens on any ranks, of which those learnt are 1 to 8 a row and its end."""
    bench.add("sixteen", [[("user", "a" * (12 - n)), ("assistant", "b" * n)] for n in range(1, 9)])
    recipe = bench.recipe(
        bench.model("llama"),
        packed,
        "sixteen",
        distributed=distributed,
        training={"global_batch_size": 8, "per_device_batch_size": micro_batch, "max_steps": 1},
    )
    if packed:
        recipe["data"]["max_seq_length"] = 16
    bench.run(world_size, recipe)
    (step,) = records(recipe, "loss")
    assert (step["tokens"], step["supervised_tokens"]) == (128, sum(range(1, 9)) + 8)
    assert 0 < step["data_wait_s"] < step["step_time_s"]


@pytest.mark.parametrize(
    ("world_size", "distributed", "micro_batch"), [(1, FSDP, 4), (1, FSDP, 1), (2, DDP, 2), (4, FSDP, 1)]
)
def test_the_schedule_counts_optimizer_steps(
    bench: Bench, world_size: int, distributed: dict[str, Any], micro_batch: int
) -> None:
    """C43: cosine, base 1, warm-up 2, total 10, on 1, 2 and 4 ranks, accumulation 1, 4 and others."""
    recipe = bench.recipe(
        bench.model("llama"),
        distributed=distributed,
        training={
            "global_batch_size": 4,
            "per_device_batch_size": micro_batch,
            "max_steps": 10,
            "learning_rate": 1.0,
            "max_grad_norm": 1e-3,
        },
        lr_scheduler={"warmup_steps": 2},
        checkpoint={"export": "none"},
    )
    recipe["optimizer"] = {"name": "sgd"}
    del recipe["data"]["validation_path"]
    bench.train(world_size, recipe)
    wanted = [0, 0.5, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]
    assert [step["learning_rate"] for step in records(recipe, "loss")] == pytest.approx(wanted, abs=5e-5)


def test_shuffled_batches_depend_on_seed_and_data_alone(bench: Bench) -> None:
    """Promise 1: the same rows meet in global batch k on one rank and on four, also in the second epoch."""
    losses = []
    for world_size, micro_batch in ((1, 12), (4, 1)):
        recipe = bench.recipe(
            bench.model("llama"),
            training={"per_device_batch_size": micro_batch, "max_steps": 5},
        )
        recipe["data"]["shuffle"] = True
        bench.train(world_size, recipe)
        losses.append([(step["tokens"], step["loss"]) for step in records(recipe, "loss")])
    one, four = losses
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in four]
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in four], rel=TOLERANCE)
