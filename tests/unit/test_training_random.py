"""C52: which ranks draw the same random numbers."""

from __future__ import annotations

import torch

from meshtune.layout import DistributedSection, Layout
from meshtune.layout.simulated import simulate
from meshtune.training.step import random_stream, seed_ranks


def draws(world_size: int, **section: int) -> list[tuple[dict[str, int], tuple[float, ...]]]:
    """Each rank's place, and what it draws in step 3."""
    layout = Layout.resolve(DistributedSection(**section), world_size)
    found = []
    for rank, stream in enumerate(simulate(layout, random_stream)):
        seed_ranks(42, 3, stream)
        found.append((layout.coordinates(rank), tuple(torch.rand(3).tolist())))
    return found


def test_ranks_of_one_tensor_parallel_group_draw_the_same_and_no_others() -> None:
    """Other rows, another part of a sequence, other layers: other numbers. The same activations: the same."""
    for section in ({"tp_size": 2}, {"tp_size": 2, "cp_size": 2}, {"tp_size": 2, "pp_size": 2, "dp_replicate_size": 2}):
        found = draws(8, **section)
        for place, numbers in found:
            for other, theirs in found:
                alike = all(place[axis] == other[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp"))
                assert (numbers == theirs) == alike


def test_another_step_draws_other_numbers_and_the_same_step_the_same() -> None:
    numbers = []
    for step in (3, 4, 3):
        seed_ranks(42, step, 0)
        numbers.append(torch.rand(3))
    assert torch.equal(numbers[0], numbers[2]) and not torch.equal(numbers[0], numbers[1])
