"""Promise 1 where a model or a sequence is cut (C14, C37, C50, C51, C54, C64): the numbers of a plain transformers loop."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.errors import ModelError
from meshtune.layout import DistributedSection, Layout
from tests.parity.conftest import Bench
from tests.parity.meshes import CP, SP, TP, check_copies, check_mesh, split
from tests.parity.models import ARCHITECTURES
from tests.parity.runs import check_course, course
from tests.parity.test_compute import train_compiled

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": TP,
    "tp2+sp": SP,
    "cp2": CP,
    "fsdp2xtp2+sp": {**SP, "dp_shard": 2},
    "ddp2xtp2": {**TP, "strategy": "ddp", "dp_shard": 2},
    "cp2xtp2": {**CP, **TP},
    "hsdp2xcp2": {**CP, "dp_replicate_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep_size": 2, "dp_shard": 2},
    "fsdp2xtp2xep2+sp": {**SP, "ep_size": 2, "dp_shard": 2},
    "ep4xtp2": {**TP, "ep_size": 4, "dp_shard": 2},
    "hsdp2xep2": {"dp_replicate_size": 2, "ep_size": 2, "dp_shard": 2},
    "cp2xep2": {**CP, "ep_size": 2},
}
MIXTURES = ["mixtral", "qwen3_moe"]
ONE_AXIS = ("tp2", "tp2+sp", "cp2")
CASES = [
    (architecture, name)
    for i, architecture in enumerate(ARCHITECTURES)
    for j, name in enumerate(LAYOUTS)
    if name in ONE_AXIS or (i + j) % 2 == 0  # each product with every other architecture
] + [(architecture, name) for architecture in MIXTURES for name in EXPERTS]


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_a_mesh_trains_as_a_plain_loop(bench: Bench, architecture: str, layout: str) -> None:
    """Unequal token counts, packed and padded, one micro-batch and three, AdamW and SGD with momentum, by turns."""
    turn = CASES.index((architecture, layout))
    optimizer = ("adamw", "sgd")[turn // 4 % 2]
    check_mesh(bench, architecture, {**LAYOUTS, **EXPERTS}[layout], turn % 2 == 0, (3, 1)[turn // 2 % 2], optimizer)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "llama"])
def test_every_method_of_context_parallelism_trains_as_a_plain_loop(
    bench: Bench, architecture: str, method: str
) -> None:
    check_mesh(bench, architecture, {**CP, "cp_method": method}, True, 6)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("layout", ["tp2+sp", "cp2xtp2", "ep4xtp2"])
def test_activation_checkpointing_runs_blocks_again_on_any_mesh(bench: Bench, layout: str, mode: str) -> None:
    check_mesh(bench, "qwen3_moe", {**LAYOUTS, **EXPERTS}[layout], True, 3, activation_checkpointing=mode)


@pytest.mark.parametrize(("layout", "backend"), [("tp2+sp", "eager"), ("ep2", "eager")])
def test_compiled_blocks_train_as_a_plain_loop_on_any_mesh(bench: Bench, layout: str, backend: str) -> None:
    """Captured by the compiler's front; that machine code computes the same, tests/parity/test_compute.py shows."""
    section, world_size, readers = split({**LAYOUTS, **EXPERTS}[layout])
    architecture = "qwen3_moe" if "ep" in layout else "qwen3"
    training = {"compile": True, "per_device_batch_size": 12 // readers // 2}
    recipe = bench.recipe(bench.model(architecture), True, distributed=section, training=training)
    del recipe["data"]["validation_path"]
    try:
        graphs = bench.ranks.call(world_size, train_compiled, recipe, bench.cache, backend, timeout=500)
    except ModelError as error:
        if "training.compile: torch.compile does not run" in str(error):
            pytest.skip(str(error))
        raise
    assert min(graphs) > 1
    check_course(course(recipe), bench.plain(architecture, True).without_validation(), 1e-4)


@pytest.mark.parametrize("layout", ["fsdp2xtp2+sp", "ddp2xtp2"])
def test_dropout_drops_the_same_of_what_tensor_parallel_ranks_share(bench: Bench, layout: str) -> None:
    """C52: else their copies of a norm would learn from other activations, and drift apart."""
    section, world_size, _ = split(LAYOUTS[layout])
    model = bench.model("gpt2", "dropout", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    recipe = bench.recipe(model, True, distributed=section, training={"per_device_batch_size": 3})
    found, digests = bench.run(world_size, recipe)
    check_copies(digests, Layout.resolve(from_mapping(DistributedSection, section), world_size), found.weights)
    assert found.loss[0] != pytest.approx(bench.plain("gpt2", True).loss[0], rel=1e-3)
