"""Cutting a row of costs into stages."""

from __future__ import annotations

import itertools
import random

import pytest
from torch import nn

from meshtune.parallel.stage_costs import cost, partition


def loads(costs: list[float], parts: list[range], first: float, last: float) -> list[float]:
    sums = [sum(costs[i] for i in part) for part in parts]
    sums[0] += first
    sums[-1] += last
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_cheaper_dearest_stage(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.randint(3, 9), draw.randint(1, 3)
    costs = [draw.choice([1.0, 1.0, 2.5, 4.0]) for _ in range(count)]
    first, last = draw.choice([0.0, 3.0]), draw.choice([0.0, 5.0])
    parts = partition(costs, stages, first, last)
    assert [i for part in parts for i in part] == list(range(count)) and all(parts) and len(parts) == stages
    best = min(
        max(loads(costs, [range(a, b) for a, b in itertools.pairwise((0, *cuts, count))], first, last))
        for cuts in itertools.combinations(range(1, count), stages - 1)
    )
    assert max(loads(costs, parts, first, last)) == pytest.approx(best)


def test_equal_blocks_are_cut_evenly() -> None:
    assert [len(part) for part in partition([1.0] * 7, 3)] == [2, 2, 3]
    assert [len(part) for part in partition([1.0] * 24, 4, first=5.0, last=5.0)] == [3, 8, 9, 4]


def test_only_the_active_share_of_stacked_experts_is_counted() -> None:
    module = nn.Module()
    module.router = nn.Linear(8, 4)
    module.experts = nn.Parameter(nn.Linear(8, 40).weight.view(4, 10, 8))
    assert cost(module) == 32 + 320 and cost(module, 0.5) == 32 + 160


def test_more_stages_than_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 groups of blocks cannot be cut into 3 stages"):
        partition([1.0, 1.0], 3)


def test_no_stage_begins_with_a_block_that_is_joined_to_the_one_before() -> None:
    assert [len(part) for part in partition([1.0] * 8, 2, joined={3, 4, 5, 6})] == [2, 6]
    assert [len(part) for part in partition([1.0] * 8, 3, joined={1, 2, 4})] == [3, 2, 3]
    with pytest.raises(ValueError, match="2 groups of blocks cannot be cut into 3 stages"):
        partition([1.0] * 3, 3, joined={1})
