"""Promise 7 (C25): in a real training step no full logits are ever held, and none are made that carry no loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtune.losses.linear_cross_entropy import LOGITS_BUDGET_BYTES
from tests.parity.conftest import Bench
from tests.parity.runs import records, train_watched

VOCABULARY = 32_768
ROWS = 96


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and the rows of the head's products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.head_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        if func is torch.ops.aten.mm.default and out.shape[1] == VOCABULARY and torch.is_grad_enabled():
            self.head_rows.append(out.shape[0])
        return out


def train_measured(recipe: dict[str, Any], cache: str) -> tuple[int, list[int]]:
    """Elements of the largest tensor that training made on this rank, and rows of each product of the head."""
    largest = LargestTensor()
    with ExitStack() as stack:
        train_watched(recipe, cache, lambda _: stack.enter_context(largest))
    return largest.elements, largest.head_rows


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "fsdp2"), (2, "fsdp2"), (2, "ddp")])
def test_full_logits_never_exist(bench: Bench, world_size: int, strategy: str, packed: bool) -> None:
    """One micro-batch with more supervised tokens than fit into a chunk of logits."""
    bench.add("long", [[("user", "a" * 20), ("assistant", "b" * (10 + n % 20))] for n in range(ROWS)])
    model = bench.model("llama", "wide", vocab_size=VOCABULARY, hidden_size=16, head_dim=4)
    recipe = bench.recipe(
        model,
        packed,
        "long",
        distributed={"strategy": strategy},
        training={"global_batch_size": ROWS, "per_device_batch_size": ROWS // world_size, "max_steps": 1},
        checkpoint={"export": "none"},
    )
    recipe["data"]["max_seq_length"] = 64
    del recipe["data"]["validation_path"]
    answers = bench.ranks.call(world_size, train_measured, recipe, bench.cache)
    (step,) = records(recipe, "loss")
    assert sum(sum(rows) for _, rows in answers) == step["supervised_tokens"]
    for elements, rows in answers:
        assert len(rows) > 1
        assert elements <= LOGITS_BUDGET_BYTES // 4 < sum(rows) * VOCABULARY
