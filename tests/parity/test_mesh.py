"""Promise 1 where a model or a sequence is cut (C14, C37, C50, C51, C54, C64): the numbers of a plain transformers loop."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.models import ARCHITECTURES
from tests.parity.runs import check_course

TP, CP = {"tp_size": 2}, {"cp_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": TP,
    "tp2+sp": {**TP, "sequence_parallel": True},
    "cp2": CP,
    "fsdp2xtp2+sp": {**TP, "sequence_parallel": True, "dp_shard": 2},
    "ddp2xtp2": {**TP, "strategy": "ddp", "dp_shard": 2},
    "cp2xtp2": {**CP, **TP},
    "hsdp2xcp2": {**CP, "dp_replicate_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep_size": 2, "dp_shard": 2},
    "fsdp2xtp2xep2+sp": {**TP, "sequence_parallel": True, "ep_size": 2, "dp_shard": 2},
    "ep4xtp2": {**TP, "ep_size": 4, "dp_shard": 2},
    "hsdp2xep2": {"dp_replicate_size": 2, "ep_size": 2, "dp_shard": 2},
    "cp2xep2": {**CP, "ep_size": 2},
}
MIXTURES = ["mixtral", "qwen3_moe"]
CASES = [(a, name) for a in ARCHITECTURES for name in LAYOUTS] + [(a, name) for a in MIXTURES for name in EXPERTS]


def split(layout: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The recipe's section, the number of ranks, and how many of them read different rows."""
    section = {key: value for key, value in layout.items() if key != "dp_shard"}
    readers = layout.get("dp_shard", 1) * layout.get("dp_replicate_size", 1)
    return section, readers * layout.get("tp_size", 1) * layout.get("cp_size", 1), readers


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_a_mesh_trains_as_a_plain_loop(bench: Bench, architecture: str, layout: str) -> None:
    """Unequal token counts, accumulation, packed and padded by turns, and shared parameters that stay equal bit for bit."""
    section, world_size, readers = split({**LAYOUTS, **EXPERTS}[layout])
    turn = CASES.index((architecture, layout))
    packed, accumulation = turn % 2 == 0, (3, 1)[turn // 2 % 2]
    training = {"per_device_batch_size": GLOBAL_BATCH // readers // math.gcd(accumulation, GLOBAL_BATCH // readers)}
    recipe = bench.recipe(bench.model(architecture), packed, distributed=section, training=training)
    found, digests = bench.run(world_size, recipe)
    check_course(found, bench.plain(architecture, packed))
    if world_size == section.get("tp_size", 1):
        norms = [name for name in digests[0] if "norm" in name or ".ln_" in name]
        assert norms and all(digests[0][name] == digests[1][name] for name in norms)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "llama"])
def test_every_method_of_context_parallelism_trains_as_a_plain_loop(
    bench: Bench, architecture: str, method: str
) -> None:
    distributed = {**CP, "cp_method": method}
    recipe = bench.recipe(
        bench.model(architecture), True, distributed=distributed, training={"per_device_batch_size": 2}
    )
    check_course(bench.run(2, recipe)[0], bench.plain(architecture, True))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("layout", ["tp2+sp", "cp2xtp2", "ep4xtp2"])
def test_activation_checkpointing_runs_blocks_again_on_any_mesh(bench: Bench, layout: str, mode: str) -> None:
    section, world_size, readers = split({**LAYOUTS, **EXPERTS}[layout])
    training = {"per_device_batch_size": GLOBAL_BATCH // readers // 3, "activation_checkpointing": mode}
    recipe = bench.recipe(bench.model("qwen3_moe"), True, distributed=section, training=training)
    check_course(bench.run(world_size, recipe)[0], bench.plain("qwen3_moe", True))
