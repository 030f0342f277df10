"""Layouts in short form, and how a run on one is held against the plain loop."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from meshtune.config import from_mapping
from meshtune.layout import AXES, DistributedSection, Layout
from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.runs import check_course

TP, CP, PP = {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}
SP = {**TP, "sequence_parallel": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"name": "sgd", "momentum": 0.9, "eps": None},
}
# Weights after three steps, relative in norm: sums over other ranks round differently, and AdamW enlarges that.
WEIGHTS = 1e-4


def split(layout: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The recipe's section, the number of ranks, and how many of them read different rows. `dp_shard` stands for ranks of
    data parallelism, which no recipe writes."""
    section = {key: value for key, value in layout.items() if key != "dp_shard"}
    readers = layout.get("dp_shard", 1) * layout.get("dp_replicate_size", 1)
    others = layout.get("tp_size", 1) * layout.get("cp_size", 1) * layout.get("pp_size", 1)
    return section, readers * others, readers


def check_mesh(
    bench: Bench,
    architecture: str,
    layout: dict[str, Any],
    packed: bool,
    accumulation: int,
    optimizer: str = "adamw",
    variant: str = "",
    **training: Any,
) -> None:
    """Train on `layout`: the numbers of the plain loop, and copies that are equal bit for bit."""
    section, world_size, readers = split(layout)
    sizes = {"per_device_batch_size": GLOBAL_BATCH // readers // accumulation}
    changes = {"distributed": section, "training": {**sizes, **training}, "optimizer": OPTIMIZERS[optimizer]}
    wanted = bench.plain(architecture, packed, variant=variant, optimizer=optimizer)
    assert wanted.grad_norm[0] > 0.5, "clipping is active"
    found, digests = bench.run(world_size, bench.recipe(bench.model(architecture, variant), packed, **changes))
    check_course(found, wanted, WEIGHTS)
    check_copies(digests, Layout.resolve(from_mapping(DistributedSection, section), world_size), found.weights)


def check_copies(digests: list[dict[str, str]], layout: Layout, weights: dict[str, Tensor]) -> None:
    """What ranks hold several times: all that replicas hold, norms, which tensor parallelism does not cut, and tied weights on
    the first stage of a pipeline and on its last."""
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for one, other in combinations(range(layout.world_size), 2):
        (axis, *more) = [axis for axis in AXES if places[one][axis] != places[other][axis]]
        if axis == "dp_replicate" and not more:
            assert digests[one] == digests[other]
        if axis == "tp" and not more:
            norms = [name for name in digests[one] if "norm" in name or ".ln_" in name]
            assert norms and {n: digests[one][n] for n in norms} == {n: digests[other][n] for n in norms}
        if axis == "pp" and not more and places[one]["pp"] == 0 and places[other]["pp"] == layout.size("pp") - 1:
            embedding, head = _one_of(digests[one], "embed_tokens.", "wte."), _one_of(digests[other], "lm_head.")
            tied = torch.equal(_one_of(weights, "embed_tokens.", "wte."), _one_of(weights, "lm_head."))
            assert (embedding == head) == tied


def _one_of(named: dict[str, Any], *modules: str) -> Any:
    return next(value for name, value in named.items() if any(f"{module}weight" in name for module in modules))
