"""Weights held in bfloat16: every layout rounds them to the same bits, and a checkpoint goes on with them on any other (C46)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.models.placing import positions
from meshtune.optim.slices import Rounding, Sliced
from tests.dist.test_optimizers import LAYOUTS, Net, copies, distance, experts_apart, fsdp, optimizer_of, stages, steps
from tests.dist.test_optimizers import tp_and_fsdp as cut_both_ways
from tests.ranks import Ranks

JOURNEY = (copies, cut_both_ways, fsdp, experts_apart, stages)


def rounded(net: Net, method: str, kind: str) -> Sliced:
    return Sliced(optimizer_of(net, method), Rounding(kind, 3, positions(net)))  # type: ignore[arg-type]


def step_by_step(net: Net, optimizer: Sliced, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["train_step"] = step
        steps(net, optimizer, iter([step]))


def distances(method: str, kind: str, run: str) -> dict[str, float]:
    """How far any weight of this rank is from the whole model's, by layout; and after a step on each of several, by checkpoints
    from one to the next."""
    torch.set_num_threads(1)
    count = len(JOURNEY)
    whole_net = Net().bfloat16()
    step_by_step(whole_net, rounded(whole_net, method, kind), 0, count)
    whole, found = {name: p.detach() for name, p in whole_net.named_parameters()}, {}
    for name, lay_out in LAYOUTS.items():
        net = Net().bfloat16()
        lay_out(net)
        step_by_step(net, rounded(net, method, kind), 0, count)
        found[name] = distance(net, whole)
    for step, lay_out in enumerate(JOURNEY):
        net = Net().bfloat16()
        lay_out(net)
        optimizer = rounded(net, method, kind)
        keeper = Checkpointer(Path(run), net, optimizer, 1)
        if step:
            keeper.load(Path(run) / "checkpoints" / f"step-{step}")
        step_by_step(net, optimizer, step, step + 1)
        keeper.save(step + 1, {})
    found["by checkpoints"] = distance(net, whole)
    return found


@pytest.mark.parametrize(("method", "kind"), [("adamw", "kahan"), ("lion", "stochastic")])
def test_every_layout_rounds_to_the_same_bits(ranks: Ranks, method: str, kind: str, tmp_path: Path) -> None:
    for found in ranks.call(4, distances, method, kind, str(tmp_path)):
        assert found == dict.fromkeys([*LAYOUTS, "by checkpoints"], 0.0)
