"""Promise 1, same numbers (C14, C35, C37, C40, C50): every layout trains as a plain transformers loop does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.models import ARCHITECTURES, UNREACHED
from tests.parity.reference import Hyperparameters, train_plainly
from tests.parity.runs import check_course

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp2": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp2x2": (4, {"strategy": "fsdp2", "dp_replicate_size": 2}),
    "fsdp4": (4, {"strategy": "fsdp2"}),
}
# Ranks that hold the same part of the model. The replicas of HSDP are the outer axis.
REPLICAS = {"ddp2": [(0, 1)], "hsdp2x2": [(0, 2), (1, 3)]}


def accumulation_of(architecture: str, layout: str, packed: bool) -> int:
    """1 or 3. Each pair of architecture and layout meets both, one of them padded and the other packed."""
    turn = list(ARCHITECTURES).index(architecture) + list(LAYOUTS).index(layout) + packed
    return (1, 3)[turn % 2]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layout_trains_as_a_plain_loop(bench: Bench, architecture: str, layout: str, packed: bool) -> None:
    """Rows of unequal token counts, a short last window, and replicas that stay equal bit for bit."""
    world_size, distributed = LAYOUTS[layout]
    accumulation = accumulation_of(architecture, layout, packed)
    training = {"per_device_batch_size": GLOBAL_BATCH // world_size // accumulation}
    recipe = bench.recipe(bench.model(architecture), packed, distributed=distributed, training=training)
    wanted = bench.plain(architecture, packed)
    assert wanted.supervised_tokens[2] < wanted.supervised_tokens[0] != wanted.supervised_tokens[1]
    found, digests = bench.run(world_size, recipe)
    check_course(found, wanted)
    for one, other in REPLICAS.get(layout, []):
        assert digests[one] == digests[other]


@pytest.mark.parametrize(
    ("layout", "packed", "accumulation"), [("ddp2", False, 3), ("ddp2", True, 1), ("hsdp2x2", True, 3)]
)
def test_a_parameter_that_no_gradient_reaches(bench: Bench, layout: str, packed: bool, accumulation: int) -> None:
    """It stays as it is, and DDP waits for none of it."""
    world_size, distributed = LAYOUTS[layout]
    training = {"per_device_batch_size": GLOBAL_BATCH // world_size // accumulation}
    recipe = bench.recipe(bench.model(UNREACHED), packed, distributed=distributed, training=training)
    check_course(bench.run(world_size, recipe)[0], bench.plain(UNREACHED, packed))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("qwen3", {"head_dim": 4}), ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1})],
    ids=["heads-of-4", "two-experts"],
)
@pytest.mark.parametrize(("strategy", "packed"), [("fsdp2", True), ("ddp", False)], ids=["fsdp2", "ddp"])
def test_three_ranks_hold_uneven_parts_and_some_none(
    bench: Bench, strategy: str, packed: bool, architecture: str, settings: dict[str, int]
) -> None:
    """A vocabulary of 260 is no multiple of three; norms of 4, and two experts, leave nothing for the third rank."""
    model = bench.model(architecture, "uneven", **settings)
    wanted = train_plainly(model, bench.windows(packed), Hyperparameters(), bench.rows("validation"))
    training = {"per_device_batch_size": 2}
    recipe = bench.recipe(model, packed, distributed={"strategy": strategy}, training=training)
    check_course(bench.run(3, recipe)[0], wanted)


@pytest.mark.parametrize("layouts", [("one", "one-ddp"), ("fsdp2", "ddp2")], ids=["one", "two"])
def test_dropout_draws_the_same_numbers_under_any_strategy(bench: Bench, layouts: tuple[str, str]) -> None:
    """They follow from seed, step and rank alone."""
    model = bench.model("gpt2", "dropout", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    courses = []
    for layout in layouts:
        world_size, distributed = {**LAYOUTS, "one-ddp": (1, {"strategy": "ddp"})}[layout]
        training = {"per_device_batch_size": GLOBAL_BATCH // world_size // 3}
        recipe = bench.recipe(model, distributed=distributed, training=training)
        courses.append(bench.run(world_size, recipe)[0])
    check_course(*courses)
    without = bench.plain("gpt2", packed=False)
    assert courses[0].loss[0] != pytest.approx(without.loss[0], rel=1e-3)
