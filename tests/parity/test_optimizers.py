"""Promise 1 for optimizers beyond AdamW: the numbers of a plain loop with the library's own optimizer on the whole model.

tests/dist/test_optimizers.py has every optimizer on every way of cutting, where gradients are equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.conftest import Bench
from tests.parity.meshes import PP, TP, WEIGHTS, split
from tests.parity.runs import TOLERANCE, check_course

FSDP = {"dp_shard": 2}
# Muon orthogonalises in bfloat16, so that the last bits of a gradient, which sums in another order change, move an update by
# that rounding: 1e-4 of a weight after three of them, 1e-6 of a loss. Shards that are orthogonalised apart miss by 5e-3.
LOOSE = 5e-4
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "adafactor-tp2": ("phi3", TP, {}, WEIGHTS),
    "lion-fsdp2xtp2": ("qwen3", {**TP, **FSDP}, {}, WEIGHTS),
    "muon-fsdp2": ("llama", FSDP, {}, LOOSE),
    "muon-tp2": ("llama", TP, {}, LOOSE),
    "schedule_free_adamw-fsdp2": ("llama", FSDP, {"eps": 1e-5}, WEIGHTS),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_layout_trains_as_a_plain_loop_with_the_librarys_own_optimizer(bench: Bench, case: str) -> None:
    """Schedule-free: losses of validation, and the export, are those of the averaged weights."""
    name = case.partition("-")[0]
    architecture, layout, constants, weights = CASES[case]
    section, world_size, readers = split(layout)
    changes: dict[str, Any] = {
        "distributed": section,
        "training": {"per_device_batch_size": 6 // readers},
        "optimizer": {"name": name, "eps": None, **constants},
    }
    if name == "muon":
        changes["optimizer"]["eps"] = 1e-5
    if name == "schedule_free_adamw":
        changes["lr_scheduler"] = {"name": "constant"}
    recipe = bench.recipe(bench.model(architecture), **changes)
    wanted = bench.plain(architecture, False, optimizer=name)
    found, _ = bench.run(world_size, recipe)
    check_course(found, wanted, weights, numbers=5e-5 if weights > WEIGHTS else TOLERANCE)


@pytest.mark.parametrize("layout", [FSDP, PP], ids=["fsdp2", "pp2"])
def test_groups_learn_at_their_own_rate(bench: Bench, layout: dict[str, Any]) -> None:
    """The head is tied: on a pipeline the first stage has the embedding, the last one its copy."""
    section, world_size, readers = split(layout)
    groups = (("lm_head", 0.5, 0.0), ("layers.0", 0.1, 0.2))
    recipe = bench.recipe(
        bench.model("qwen3"),
        distributed=section,
        training={"per_device_batch_size": 6 // readers},
        optimizer={"groups": [{"match": [m], "lr_scale": rate, "weight_decay": decay} for m, rate, decay in groups]},
    )
    found, _ = bench.run(world_size, recipe)
    check_course(found, bench.plain("qwen3", False, groups=groups), WEIGHTS)
