"""Ranks whose rows reach different parameters, and parameters that no row reaches, train as one process does (C50)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.layout import DistributedSection, Layout, Plan
from meshtune.optim.section import OptimizerSection
from meshtune.parallel import Parallel, Settings, replicate, shard
from tests.ranks import Ranks

WIDTH, STEPS = 6, 3


class Layer(nn.Module):
    """Three experts, of which a row is sent to one, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](self.inner(x).tanh())


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.forwards = 0

    def forward(self, objective: Any, rows: list[tuple[Tensor, int]]) -> Any:
        return objective(self, rows)

    def run(self, rows: list[tuple[Tensor, int]]) -> tuple[Tensor, None, dict[str, Tensor]]:
        self.forwards += 1
        losses = []
        for x, expert in rows:
            for index, layer in enumerate(self.layers):
                x = layer(x, (expert + index) % 3)
            losses.append(self.head(x).square().sum())
        return torch.stack(losses).sum(), None, {}


def micro_batch(step: int, part: int, rank: int, expert_of: str) -> list[tuple[Tensor, int]]:
    """One row. `same`: all go to one expert; `apart`: each rank's to another; `changing`: apart from step 2 on."""
    torch.manual_seed(100 * step + 10 * part + rank)
    apart = expert_of == "apart" or (expert_of == "changing" and step > 0)
    return [(torch.randn(WIDTH), (part + rank) % 2 if apart else 0)]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return OptimizerSection(weight_decay=0.5).build(model.named_modules(), 0.05)


def one_process(ranks: int, expert_of: str) -> dict[str, Tensor]:
    root = Root()
    update = optimizer(root)
    for step in range(STEPS):
        for part in range(2):
            for rank in range(ranks):
                root.run(micro_batch(step, part, rank, expert_of))[0].backward()
        update.step()
        update.zero_grad()
    return {name: parameter.detach() for name, parameter in root.named_parameters()}


def many_processes(section: DistributedSection, expert_of: str) -> tuple[dict[str, Tensor], int]:
    layout = Layout.resolve(section, dist.get_world_size()).connect()
    root = Root()
    plan = Plan(("layers.0", "layers.1"))
    parallel: Parallel = replicate(root, root, layout, shard(root, root, layout, plan, Settings()), Settings())
    update = optimizer(root)
    for step in range(STEPS):
        batches = [micro_batch(step, part, dist.get_rank(), expert_of) for part in range(2)]
        parallel.train(lambda root, rows: root.run(rows), batches, 1.0)
        update.step()
        update.zero_grad()
    weights = {name: parameter.detach() for name, parameter in root.named_parameters()}
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}
    return whole, root.forwards


LAYOUTS = {
    "fsdp2": (2, DistributedSection()),
    "hsdp": (4, DistributedSection(dp_replicate_size=2)),
    "ddp": (2, DistributedSection(strategy="ddp")),
}


@pytest.mark.parametrize("expert_of", ["same", "apart", "changing"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_parameter_moves_as_in_one_process(ranks: Ranks, layout: str, expert_of: str) -> None:
    """An expert that only one rank reaches gets its gradient alone; one that none reaches does not decay."""
    world_size, section = LAYOUTS[layout]
    wanted = one_process(world_size, expert_of)
    start = dict(Root().named_parameters())
    assert torch.equal(wanted["layers.0.unused.weight"], start["layers.0.unused.weight"])
    for found, forwards in ranks.call(world_size, many_processes, section, expert_of):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        assert forwards == STEPS * 2
