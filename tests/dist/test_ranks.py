"""The pool of rank processes itself: what the tests of several ranks stand on."""

from __future__ import annotations

import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshtune.errors import LayoutError
from meshtune.verify.pool import RankLostError
from tests.ranks import Ranks


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


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def leave_a_variable() -> None:
    os.environ["LEFT"] = "here"


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
    answers = ranks.call(world_size, describe, torch.tensor([2.0, 3.0]))
    assert [answer["RANK"] for answer in answers] == [answer["LOCAL_RANK"] for answer in answers]
    assert [answer["RANK"] for answer in answers] == [str(rank) for rank in range(world_size)]
    assert {answer["WORLD_SIZE"] for answer in answers} == {str(world_size)}
    assert all(torch.equal(answer["total"], torch.tensor([2.0, 3.0]) * world_size) for answer in answers)
    assert {answer["threads"] for answer in answers} == {1}


def test_processes_stay_for_the_next_job_also_after_an_error(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtune.verify.pool._JOBS_OF_A_PROCESS", 100)
    before = [answer["pid"] for answer in ranks.call(2, describe, torch.ones(1))]
    with pytest.raises(LayoutError):
        ranks.call(2, fail_on, 0)
    assert [answer["pid"] for answer in ranks.call(2, describe, torch.ones(1))] == before


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_rank_is_reported_and_not_the_one_that_waited_for_it(ranks: Ranks, rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} cannot") as caught:
        ranks.call(2, fail_on, rank)
    assert f"raised on rank {rank}; remote traceback" in caught.value.__notes__[-1]
    assert "in fail_on" in caught.value.__notes__[-1]


def test_a_rank_that_hangs_after_another_failed_is_replaced(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtune.verify.pool._GRACE_S", 0.5)
    with pytest.raises(LayoutError, match="rank 1 cannot"):
        ranks.call(2, fail_while_the_rest_sleeps)
    assert len(ranks.call(2, describe, torch.ones(1))) == 2


def test_a_timeout_replaces_the_processes(ranks: Ranks) -> None:
    with pytest.raises(RankLostError, match="rank 0 did not answer in time"):
        ranks.call(1, sleep, timeout=1.0)
    assert len(ranks.call(2, describe, torch.ones(1))) == 2


def test_a_process_that_dies_is_reported_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankLostError):
        ranks.call(1, end_the_process)
    assert len(ranks.call(1, describe, torch.ones(1))) == 1


def test_meshes_of_one_job_do_not_leak_into_the_next(ranks: Ranks) -> None:
    """Group names repeat from job to job, and DTensor caches meshes with their group names."""
    for earlier in (None, (4, 1), (2, 2)):
        for result in ranks.call(4, double_on_a_mesh_made_after, earlier):
            assert torch.equal(result, torch.arange(8.0) * 2)


def test_a_process_is_replaced_after_some_jobs(ranks: Ranks) -> None:
    """Threads of the groups of earlier jobs may live on in it."""
    pids = {ranks.call(1, describe, torch.ones(1))[0]["pid"] for _ in range(8)}
    assert len(pids) > 1


def test_the_environment_of_one_job_does_not_reach_the_next(ranks: Ranks) -> None:
    ranks.call(2, leave_a_variable)
    assert ranks.call(2, os.getenv, "LEFT") == [None, None]


def test_a_function_that_cannot_be_imported_is_refused(ranks: Ranks) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ranks.call(1, lambda: None)


def test_a_process_that_died_while_its_answer_was_awaited_is_not_waited_for(ranks: Ranks) -> None:
    """The pool once read from the process that took the dead one's place, which had no job."""
    begun = time.monotonic()
    for _ in range(4):
        with pytest.raises(RankLostError):
            ranks.call(2, die_on_rank_1)
    assert time.monotonic() - begun < 60
