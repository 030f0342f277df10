"""Activation checkpointing and compile change time and memory, never a number."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune.errors import ModelError
from tests.parity.conftest import Bench
from tests.parity.runs import check_course, course, train, train_watched

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp": (4, {"dp_replicate_size": 2}),
}
ACTIVATION, ATTENTION = "aten.silu", "aten._scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def train_counted(recipe: dict[str, Any], cache: str) -> dict[str, float]:
    """How often training ran an activation, and an attention, for each time it ran its backward."""
    operations = Operations()
    with ExitStack() as stack:
        train_watched(recipe, cache, lambda _: stack.enter_context(operations))
    count = operations.count
    return {name: count[name] / count[f"{name}_backward"] for name in (ACTIVATION, ATTENTION)}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_checkpointing_computes_again_what_it_says(bench: Bench, layout: str, mode: str) -> None:
    """`full` runs all of a block twice, `selective` not its attention; every number stays."""
    world_size, distributed = LAYOUTS[layout]
    packed = (list(LAYOUTS).index(layout) + ["none", "full", "selective"].index(mode)) % 2 == 0
    recipe = bench.recipe(
        bench.model("qwen3"),
        packed,
        distributed=distributed,
        training={"activation_checkpointing": mode, "per_device_batch_size": 12 // world_size // 3},
    )
    del recipe["data"]["validation_path"]
    wanted = {"none": (1, 1), "full": (2, 2), "selective": (2, 1)}[mode]
    for found in bench.ranks.call(world_size, train_counted, recipe, bench.cache):
        assert found == dict(zip((ACTIVATION, ATTENTION), wanted, strict=True))
    check_course(course(recipe), bench.plain("qwen3", packed).without_validation())


def train_compiled(recipe: dict[str, Any], cache: str, backend: str) -> int:
    """Graphs that were compiled on this rank. The backend `eager` runs what was captured as it is."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(backend)
    try:
        train(recipe, cache)
    finally:
        torch.compiler.set_default_backend(before)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("layout", "architecture", "packed"), [("ddp", "gemma2", False), ("fsdp2", "llama", True)])
def test_captured_blocks_train_as_a_plain_loop(bench: Bench, layout: str, architecture: str, packed: bool) -> None:
    world_size, distributed = LAYOUTS[layout]
    recipe = bench.recipe(
        bench.model(architecture),
        packed,
        distributed=distributed,
        training={"compile": True, "per_device_batch_size": 12 // world_size // 3},
    )
    graphs = bench.ranks.call(world_size, train_compiled, recipe, bench.cache, "eager")
    # One is the check that the compiler runs.
    assert min(graphs) > 1
    check_course(course(recipe), bench.plain(architecture, packed))


def test_blocks_compiled_to_machine_code_train_as_a_plain_loop(bench: Bench) -> None:
    """Needs a C++ compiler; without one, compile is refused."""
    recipe = bench.recipe(bench.model("qwen3"), training={"compile": True, "per_device_batch_size": 12})
    del recipe["data"]["validation_path"]
    try:
        bench.ranks.call(1, train_compiled, recipe, bench.cache, "inductor", timeout=500)
    except ModelError as error:
        if "training.compile: torch.compile does not run" in str(error):
            pytest.skip(str(error))
        raise
    check_course(course(recipe), bench.plain("qwen3", packed=False).without_validation())
