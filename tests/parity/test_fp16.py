"""fp16: a plain transformers loop with torch.amp.GradScaler, on every layout; overflows, which no rank may judge alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from meshtune.training.loss_scale import LossScale
from tests.parity.conftest import Bench
from tests.parity.conversations import Row
from tests.parity.reference import Hyperparameters, _optimizer, token_losses
from tests.parity.runs import digests, records, train_watched

ROUNDING = 1e-3  # ten bits of mantissa
STEPS = 5
# For the first three steps of this model, on its micro-batches as in the plain loop's batch, and not for the next two.
TOO_LARGE = 2.0**19


def plainly(folder: Path, windows: list[list[Row]], scale: float = 2.0**16) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, scale) of each step, under autocast."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    hyperparameters = Hyperparameters()
    optimizer = _optimizer(model, hyperparameters)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, len(windows))
    scaler, course = torch.amp.GradScaler("cpu", init_scale=scale), []
    for rows in windows:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = token_losses(model, rows).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), hyperparameters.max_grad_norm)
        course.append((loss.item(), norm.item(), scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    return course


def recipe(bench: Bench, model: Path, distributed: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    training = {"precision": "fp16", "per_device_batch_size": 3, **changes.pop("training", {})}
    return bench.recipe(model, distributed=distributed, training=training, **changes)


@pytest.mark.parametrize(
    ("world_size", "distributed"),
    [
        (1, {}),
        (2, {"strategy": "fsdp2"}),
        (2, {"strategy": "ddp"}),
        (2, {"tp_size": 2, "sequence_parallel": True}),
        (2, {"cp_size": 2}),
        (2, {"pp_size": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_fp16_follows_a_plain_loop(bench: Bench, world_size: int, distributed: dict[str, Any]) -> None:
    """Loss, unscaled gradient norm and scale of each step; weights stay in float32."""
    made = recipe(bench, bench.model("llama"), distributed)
    on_ranks = bench.train(world_size, made)
    steps, wanted = records(made, "loss"), plainly(bench.model("llama"), bench.windows(False)[:3])
    assert [step["loss"] for step in steps] == pytest.approx([loss for loss, _, _ in wanted], rel=ROUNDING)
    assert [step["grad_norm"] for step in steps] == pytest.approx([norm for _, norm, _ in wanted], rel=ROUNDING)
    assert [step["loss_scale"] for step in steps] == [scale for _, _, scale in wanted]
    assert [step["overflows"] for step in steps] == [0, 0, 0]
    assert all(digest.startswith("torch.float32") for rank in on_ranks for digest in rank.values())


def test_the_balance_of_routers_is_scaled_as_the_loss_is(bench: Bench) -> None:
    """Its gradient does not come from the loss: with experts on two ranks, and a term that is most of the norm."""
    model = bench.model("qwen3_moe", "fp16", output_router_logits=True, router_aux_loss_coef=5.0)
    courses = []
    for precision, world_size, distributed in (("fp32", 1, {}), ("fp16", 2, {"ep_size": 2})):
        made = recipe(bench, model, distributed, training={"precision": precision})
        bench.train(world_size, made)
        courses.append([(step["loss"], step["grad_norm"]) for step in records(made, "loss")])
    assert [loss for loss, _ in courses[1]] == pytest.approx([loss for loss, _ in courses[0]], rel=ROUNDING)
    assert [norm for _, norm in courses[1]] == pytest.approx([norm for _, norm in courses[0]], rel=1e-2)


@pytest.mark.parametrize(
    "distributed",
    [{"strategy": "fsdp2"}, {"tp_size": 2}, {"pp_size": 2}],
    ids=["fsdp2", "tp", "pp"],
)
def test_an_overflow_is_skipped_on_all_ranks(bench: Bench, distributed: dict[str, Any]) -> None:
    """From a scale that is too large: the course of a plain loop that skips the same steps; and no step is bad."""
    changes = {"max_steps": STEPS, "per_device_batch_size": 6, "max_bad_steps": 0, "on_nonfinite": "skip"}
    made = recipe(bench, bench.model("llama"), distributed, training=changes)
    moved = bench.ranks.call(2, from_a_scale_that_is_too_large, made, bench.cache)
    windows = bench.windows(False)[:3]
    wanted = plainly(bench.model("llama"), [*windows, *windows[:2]], TOO_LARGE)
    steps = records(made, "loss")
    assert [step["loss_scale"] for step in steps] == [scale for _, _, scale in wanted]
    assert [step["overflows"] for step in steps] == [1, 2, 3, 3, 3]
    assert [step["loss"] for step in steps] == pytest.approx([loss for loss, _, _ in wanted], rel=ROUNDING)
    assert [step["grad_norm"] for step in steps[:3]] == [None] * 3
    assert [step["grad_norm"] for step in steps[3:]] == pytest.approx([norm for _, norm, _ in wanted[3:]], rel=ROUNDING)
    assert not records(made, "skipped")
    assert all(moved)


def test_a_resumed_run_goes_on_with_its_scale(bench: Bench) -> None:
    made = recipe(
        bench,
        bench.model("llama"),
        {},
        training={"max_steps": STEPS, "per_device_batch_size": 6},
        checkpoint={"dir": str(bench.folder / "run-fp16-resumed"), "every_steps": 2},
    )
    bench.ranks.call(1, from_a_scale_that_is_too_large, made, bench.cache)
    straight = [without_times(step) for step in records(made, "loss")]
    run = Path(made["checkpoint"]["dir"])
    last = max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(last)
    bench.ranks.call(1, from_a_scale_that_is_too_large, made, bench.cache)
    assert [without_times(step) for step in records(made, "loss")] == straight
    assert [step["overflows"] for step in straight] == [1, 2, 3, 3, 3]


def from_a_scale_that_is_too_large(made: dict[str, Any], cache: str) -> bool:
    """On a rank: train; whether its weights have moved at all."""
    before: dict[str, str] = {}
    with patch("meshtune.recipes.assembly.LossScale", lambda: LossScale(TOO_LARGE)):
        model = train_watched(made, cache, lambda model: before.update(digests(model)))
    return digests(model) != before


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    measured = ("tokens_per_second", "mfu", "peak_memory_bytes", "step_time_s", "data_wait_s")
    return {name: value for name, value in record.items() if name not in measured}
