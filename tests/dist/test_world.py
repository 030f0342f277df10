"""Ranks that wait for one of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshtune.errors import DataError
from meshtune.layout.world import World
from tests.ranks import Ranks

PATIENCE_S = 1.0


def world_of_impatient_collectives() -> World:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE_S), dist.group.WORLD)
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def prepare_for_long() -> list[int]:
    here, done = world_of_impatient_collectives(), []

    def work() -> int:
        if here.rank == 0:
            time.sleep(3 * PATIENCE_S)
        done.append(here.rank)
        return len(done)

    return [here.each_node_first(work), here.each_node_first(work)]


def fail_after_long() -> str:
    here = world_of_impatient_collectives()

    def work() -> None:
        time.sleep(2 * PATIENCE_S)
        raise DataError("no row")

    with pytest.raises(DataError) as error:
        here.each_node_first(work)
    return str(error.value)


def test_ranks_wait_longer_for_preparation_than_collectives_do(ranks: Ranks) -> None:
    """Rows of an hour's work must not end in a timeout on the other ranks."""
    assert ranks.call(2, prepare_for_long) == [[1, 2], [1, 2]]
    assert ranks.call(2, fail_after_long) == ["no row", "no row"]
