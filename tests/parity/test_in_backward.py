"""The optimizer's step in the backward: the numbers of a step after it, and gradients that are never there together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshtune.errors import RecipeError
from meshtune.optim.in_backward import InBackward
from tests.parity.conftest import Bench
from tests.parity.models import UNREACHED
from tests.parity.runs import records, train


def train_watched(recipe: dict[str, Any], cache: str) -> tuple[dict[str, str], int, int]:
    """Digests of what this rank holds at the end, the most gradients that were there when one was complete, and parameters."""
    most, count = [0], [0]
    take = InBackward._take

    def watched(self: InBackward, group: Any, name: str, parameter: nn.Parameter) -> None:
        parameters = [p for each in self.param_groups for p in each["params"]]
        most[0], count[0] = max(most[0], sum(p.grad is not None for p in parameters)), len(parameters)
        take(self, group, name, parameter)

    InBackward._take = watched  # type: ignore[method-assign]
    try:
        return train(recipe, cache), most[0], count[0]
    finally:
        InBackward._take = take  # type: ignore[method-assign]


CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, "qwen3", {}, {"optimizer": {"name": "sgd", "momentum": 0.9, "eps": None}}),
    "fsdp2-unreached": (2, UNREACHED, {}, {}),
    "ep2": (2, "qwen3_moe", {"ep_size": 2}, {}),
    "tp2": (2, "phi3", {"tp_size": 2}, {}),
    "one-bf16-weights": (1, "gemma2", {}, {"model": {"dtype": "bfloat16"}, "training": {"precision": "bf16"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_as_a_step_after_the_backward(bench: Bench, case: str) -> None:
    """Losses, norms and weights, bit for bit."""
    world_size, architecture, distributed, more = CASES[case]
    found = []
    for inside in (False, True):
        training = {
            "max_grad_norm": None,
            "per_device_batch_size": 12 // max(1, world_size // distributed.get("tp_size", 1)),
            **more.get("training", {}),
        }
        optimizer = {**more.get("optimizer", {}), "in_backward": inside}
        changes = {
            "distributed": distributed,
            "training": training,
            "optimizer": optimizer,
            "checkpoint": {"export": "none"},
        }
        recipe = bench.recipe(bench.model(architecture), True, None, **changes)
        recipe["checkpoint"]["export"] = "none"
        recipe["model"] |= more.get("model", {})
        del recipe["data"]["validation_path"]
        answers = bench.ranks.call(world_size, train_watched, recipe, bench.cache)
        lines = [{key: line[key] for key in ("loss", "grad_norm")} for line in records(recipe, "loss")]
        found.append((lines, [digests for digests, _, _ in answers]))
    assert found[0] == found[1]
    for _, most, parameters in answers:
        assert 0 < most < parameters / 2


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (1, {"training": {"max_grad_norm": 1.0}}, "cannot clip by the norm"),
        (
            1,
            {"optimizer": {"name": "adafactor", "eps": None}},
            "which update each element by itself, not with adafactor",
        ),
        (1, {"training": {"on_nonfinite": "skip"}}, "cannot skip"),
        (1, {"training": {"per_device_batch_size": 4}}, "an optimizer step has 3 micro-batches"),
        (2, {"distributed": {"strategy": "ddp"}}, "is not made for strategy: ddp"),
        (2, {"distributed": {"pp_size": 2}}, "cannot be had with pp_size"),
        (2, {"distributed": {"tp_size": 2, "sequence_parallel": True}}, "added up after the backward"),
    ],
    ids=lambda value: None if isinstance(value, int | dict) else value[:14],
)
def test_what_it_cannot_do_is_said(bench: Bench, world_size: int, changes: dict[str, Any], message: str) -> None:
    changes["training"] = {
        "max_grad_norm": None,
        "per_device_batch_size": 12 // world_size,
        **changes.get("training", {}),
    }
    changes["optimizer"] = {"in_backward": True, **changes.get("optimizer", {})}
    if changes.get("distributed", {}).keys() & {"tp_size", "pp_size"}:
        changes["training"]["per_device_batch_size"] = 12
    recipe = bench.recipe(bench.model("llama"), False, None, **changes)
    with pytest.raises(RecipeError, match=message):
        bench.ranks.call(world_size, train, recipe, bench.cache)


def test_gradients_of_one_parameter_are_freed_before_the_next() -> None:
    """A weight that two layers share has its gradient once, from both."""
    embedding = nn.Embedding(5, 4)
    head = nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    group = {"params": [embedding.weight], "names": ["w"]}
    optimizer = InBackward(torch.optim.SGD([group], lr=1.0))
    loss = head(embedding(torch.arange(5))).square().sum()
    (wanted,) = torch.autograd.grad(loss, embedding.weight, retain_graph=True)
    loss.backward()
    assert embedding.weight.grad is None
    torch.testing.assert_close(before - embedding.weight.detach(), wanted)
    (norm,) = optimizer.norms.values()
    torch.testing.assert_close(norm, wanted.norm())
