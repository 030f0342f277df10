"""The pool of rank processes itself: what the tests of several ranks stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshtune.errors import LayoutError
from tests.ranks import RankDiedError, Ranks, RanksTimeoutError


def describe(value: torch.Tensor) -> dict[str, object]:
    total = value.clone()
    dist.all_reduce(total)
    environment = {
        name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return {"pid": os.getpid(), "total": total, "threads": torch.get_num_threads(), **environment}


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LayoutError(f"rank {rank} cannot")
    dist.barrier()


def fail_while_the_rest_sleeps() -> None:
    if dist.get_rank() == 1:
        raise LayoutError("rank 1 cannot")
    time.sleep(300)


def end_the_process() -> None:
    os._exit(3)


def sleep() -> None:
    time.sleep(300)


def double_on_a_mesh_made_after(earlier: tuple[int, int] | None) -> torch.Tensor:
    if earlier is not None:
        init_device_mesh("cpu", earlier, mesh_dim_names=("a", "b"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("c", "d"))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    return (tensor * 2).full_tensor()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_runs_in_its_own_world(ranks: Ranks, world_size: int) -> None:
    answers = ranks.run(world_size, describe, torch.tensor([2.0, 3.0]))
    assert [answer["RANK"] for answer in answers] == [answer["LOCAL_RANK"] for answer in answers]
    assert [answer["RANK"] for answer in answers] == [str(rank) for rank in range(world_size)]
    assert {answer["WORLD_SIZE"] for answer in answers} == {str(world_size)}
    assert all(torch.equal(answer["total"], torch.tensor([2.0, 3.0]) * world_size) for answer in answers)
    assert {answer["threads"] for answer in answers} == {1}


def test_processes_stay_for_the_next_job_also_after_an_error(ranks: Ranks) -> None:
    before = [answer["pid"] for answer in ranks.run(2, describe, torch.ones(1))]
    with pytest.raises(LayoutError):
        ranks.run(2, fail_on, 0)
    assert [answer["pid"] for answer in ranks.run(2, describe, torch.ones(1))] == before


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_rank_is_reported_and_not_the_one_that_waited_for_it(ranks: Ranks, rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} cannot") as caught:
        ranks.run(2, fail_on, rank)
    assert f"raised on rank {rank}; remote traceback" in caught.value.__notes__[-1]
    assert "in fail_on" in caught.value.__notes__[-1]


def test_a_rank_that_hangs_after_another_failed_is_replaced(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.5)
    with pytest.raises(LayoutError, match="rank 1 cannot"):
        ranks.run(2, fail_while_the_rest_sleeps)
    assert len(ranks.run(2, describe, torch.ones(1))) == 2


def test_a_timeout_replaces_the_processes(ranks: Ranks) -> None:
    with pytest.raises(RanksTimeoutError, match=r"ranks \[0\] of 1"):
        ranks.run(1, sleep, timeout=1.0)
    assert len(ranks.run(2, describe, torch.ones(1))) == 2


def test_a_process_that_dies_is_reported_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankDiedError):
        ranks.run(1, end_the_process)
    assert len(ranks.run(1, describe, torch.ones(1))) == 1


def test_meshes_of_one_job_do_not_leak_into_the_next(ranks: Ranks) -> None:
    """Group names repeat from job to job, and DTensor caches meshes with their group names."""
    for earlier in (None, (4, 1), (2, 2)):
        for result in ranks.run(4, double_on_a_mesh_made_after, earlier):
            assert torch.equal(result, torch.arange(8.0) * 2)


def test_a_function_that_cannot_be_imported_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="top of its module"):
        ranks.run(1, lambda: None)
    with pytest.raises(ValueError, match="the pool has 8"):
        ranks.run(9, sleep)
