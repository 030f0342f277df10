"""fp8 through torchao, emulated: its own conversion of a plain model is what every layout must equal."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from meshtune.layout.wrapped import is_wrapped
from meshtune.models.causal_lm import CausalLM
from tests.parity.conftest import Bench
from tests.parity.conversations import Row
from tests.parity.reference import Hyperparameters, _optimizer, token_losses
from tests.parity.runs import digests, exported_weights, records, train_watched

BATCH = 4
# Where rounding is the same, but for sums in another order that move a few values over a border of float8.
SAME = 2e-4
# What float8 itself comes to in these models.
ROUNDING = 0.05


def plainly(folder: Path, windows: list[list[Row]], recipe: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step in float32 but for torchao's layers, a row at a time: none is padded."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path != "lm_head")
    hyperparameters = Hyperparameters()
    optimizer = _optimizer(model, hyperparameters)
    schedule, course = get_cosine_schedule_with_warmup(optimizer, 0, len(windows)), []
    for rows in windows:
        supervised = sum(sum(row.supervised[1:]) for row in rows)
        loss = 0.0
        for row in rows:
            part = token_losses(model, [row]).sum() / supervised
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), hyperparameters.max_grad_norm)
        course.append((loss, norm.item()))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return course


@pytest.fixture(scope="module")
def model(bench: Bench) -> Path:
    """Its sizes are multiples of 16, on two ranks of tp as well."""
    return bench.model("llama", "fp8", num_key_value_heads=4, intermediate_size=64)


@pytest.fixture(scope="module")
def wanted(bench: Bench, model: Path) -> Any:
    return cache(lambda recipe: plainly(model, bench.windows(False, BATCH)[:3], recipe))


def made_recipe(
    bench: Bench, model: Path, distributed: dict[str, Any], fp8: dict[str, Any], **more: Any
) -> dict[str, Any]:
    training = {"precision": "fp8", "fp8": fp8, "global_batch_size": BATCH, "per_device_batch_size": 1, **more}
    return bench.recipe(model, distributed=distributed, training=training)


@pytest.mark.parametrize(
    ("world_size", "distributed", "fp8", "checkpointing"),
    [
        (1, {}, {}, "selective"),
        (1, {}, {"recipe": "rowwise"}, "full"),
        (2, {"strategy": "ddp"}, {}, "none"),
        (2, {"strategy": "fsdp2"}, {"all_gather": True}, "none"),
        (2, {"pp_size": 2}, {"recipe": "rowwise"}, "none"),
    ],
    ids=["one-tensorwise", "one-rowwise", "ddp", "fsdp2-gathered-in-fp8", "pp-rowwise"],
)
def test_fp8_is_torchaos_own_conversion(
    bench: Bench, model: Path, wanted: Any, world_size: int, distributed: Any, fp8: Any, checkpointing: str
) -> None:
    """With the rest in float32, so that nothing else is rounded."""
    made = made_recipe(bench, model, distributed, fp8, activation_checkpointing=checkpointing)
    layers = bench.ranks.call(world_size, train_in_float32, made, bench.cache)
    steps, plain = records(made, "loss"), wanted(fp8.get("recipe", "tensorwise"))
    assert [step["loss"] for step in steps] == pytest.approx([loss for loss, _ in plain], rel=SAME)
    assert [step["grad_norm"] for step in steps] == pytest.approx([norm for _, norm in plain], rel=10 * SAME)
    assert sum(len(names) for names, _ in layers) == 14 * (1 if "pp_size" in distributed else world_size)
    assert all(kept == (set(names) if fp8.get("all_gather") else set()) for names, kept in layers)


def test_a_weight_that_is_gathered_in_fp8_is_updated_whole(bench: Bench, model: Path) -> None:
    """By an optimizer that needs all of what one rank has; its moments of so small weights are AdamW's, in float32."""
    courses = []
    for optimizer in ("adamw", "adamw_8bit"):
        made = made_recipe(bench, model, {}, {"all_gather": True})
        made["optimizer"]["name"] = optimizer
        bench.train(1, made)
        courses.append([step["loss"] for step in records(made, "loss")])
    assert courses[1] == pytest.approx(courses[0], rel=SAME)


@pytest.mark.parametrize(
    ("world_size", "distributed", "fp8"),
    [
        (2, {"tp_size": 2, "sequence_parallel": True}, {"recipe": "rowwise"}),
        (2, {"cp_size": 2}, {}),
        (4, {"tp_size": 2}, {"all_gather": True}),
    ],
    ids=["tp-sp", "cp", "fsdp2-tp-gathered-in-fp8"],
)
def test_parts_of_tensors_have_scales_of_their_own(
    bench: Bench, model: Path, world_size: int, distributed: Any, fp8: Any
) -> None:
    """Numbers stay within float8's rounding of those in float32, and are not those: it is in 8 bits that layers multiply."""
    made = made_recipe(bench, model, distributed, fp8)
    bench.ranks.call(world_size, train_in_float32, made, bench.cache)
    plain = bench.plain("llama", False, BATCH, "fp8")
    steps = records(made, "loss")
    assert [step["loss"] for step in steps] == pytest.approx(plain.loss, rel=ROUNDING)
    assert [step["grad_norm"] for step in steps] == pytest.approx(plain.grad_norm, rel=2 * ROUNDING)
    assert steps[0]["loss"] != pytest.approx(plain.loss[0], rel=1e-5)


def test_a_run_in_fp8_learns_as_one_in_float32(bench: Bench, model: Path) -> None:
    """With bf16 around, as it is meant; stopped, and resumed from shards that are gathered in float8, to the same bits."""
    steps = 12
    fp8 = made_recipe(
        bench, model, {"strategy": "fsdp2"}, {"all_gather": True}, max_steps=steps, per_device_batch_size=2
    )
    fp8["checkpoint"]["every_steps"] = steps // 2
    straight = bench.train(2, fp8)
    course, run = records(fp8, "loss"), Path(fp8["checkpoint"]["dir"])
    weights = exported_weights(run / "export")
    shutil.rmtree(max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime))
    assert bench.train(2, fp8) == straight
    assert [step["loss"] for step in records(fp8, "loss")] == [step["loss"] for step in course]
    exact = made_recipe(bench, model, {}, {}, max_steps=steps, per_device_batch_size=4, precision="fp32")
    del exact["training"]["fp8"]
    bench.train(1, exact)
    losses = [step["loss"] for step in records(exact, "loss")]
    assert losses[-1] < 0.8 * losses[0]
    assert [step["loss"] for step in course] == pytest.approx(losses, rel=ROUNDING)
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def train_in_float32(made: dict[str, Any], cache: str) -> tuple[list[str], set[str]]:
    """On a rank: train with float32 around; which layers are torchao's, and whose weights are gathered in float8."""
    from torchao.float8.float8_linear import Float8Linear

    layers: dict[str, bool] = {}

    def look(model: CausalLM) -> None:
        layers.update({n: is_wrapped(m.weight) for n, m in model.named_modules() if isinstance(m, Float8Linear)})

    with ExitStack() as held:
        held.enter_context(patch.dict("meshtune.observe.precision._COMPUTE", fp8="float32"))
        held.enter_context(patch("meshtune.training.reporting.loss_png"))
        digests(train_watched(made, cache, look))
    return list(layers), {name for name, kept in layers.items() if kept}


def test_the_frozen_base_of_an_adapter_computes_in_fp8(bench: Bench, model: Path) -> None:
    """Its layers are torchao's, gathered in float8; the adapter's own are not, and learn as beside a base in float32."""
    courses = []
    for world_size, more in ((1, {"precision": "fp32"}), (2, {"precision": "fp8", "fp8": {"all_gather": True}})):
        made = bench.recipe(model, training={"global_batch_size": BATCH, "per_device_batch_size": 1, **more})
        made["peft"] = {"r": 16, "target_modules": ["q_proj", "down_proj"]}
        layers = bench.ranks.call(world_size, train_in_float32, made, bench.cache)
        courses.append([(step["loss"], step["grad_norm"]) for step in records(made, "loss")])
    for found, wanted in zip(courses[1], courses[0], strict=True):
        assert found == pytest.approx(wanted, rel=2 * ROUNDING)
    names, gathered = layers[0]
    assert len(names) == 14 and set(names) == gathered
    assert {name.rpartition(".")[2] for name in names if "q_proj" in name or "down_proj" in name} == {"base_layer"}
    facts = json.loads((Path(made["checkpoint"]["dir"]) / "layout.json").read_text(encoding="utf-8"))
    assert facts["fp8"] == {"backend": "torchao", "recipe": "tensorwise", "all_gather": True, "emulate": True}
