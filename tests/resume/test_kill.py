"""kill -9 at any instant: a run goes on from its last complete checkpoint, as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint import folder
from tests.resume.conftest import Bench
from tests.resume.processes import children_of, forked, is_alive, last_step, started, wait_for, write_recipe
from tests.resume.runs import lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes and looks for them in /proc")

STEPS = 24


def recipe_of(bench: Bench, **changes: Any) -> dict[str, Any]:
    return bench.recipe(
        bench.model("llama"),
        data={"train_path": str(bench.train_path), "validation_path": str(bench.validation_path)},
        training={"max_steps": STEPS, "global_batch_size": 4, "eval_every_steps": 5},
        checkpoint={"every_steps": 1, "keep": 2},
        **changes,
    )


def in_folder(recipe: dict[str, Any], run: Path) -> dict[str, Any]:
    return {**recipe, "checkpoint": {**recipe["checkpoint"], "dir": str(run)}}


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench) -> list[dict[str, Any]]:
    recipe = recipe_of(bench)
    assert bench.train(recipe).error is None
    return lines(Path(recipe["checkpoint"]["dir"]))


def assert_one_run(run: Path, wanted: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    found = lines(run)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, reference in zip(found, wanted, strict=True):
        assert row.keys() == reference.keys()
        assert row == pytest.approx(reference, rel=tolerance)


def test_one_process_at_random_instants(bench: Bench, tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """Also while it starts, saves, removes and renames; then it ends on another number of ranks."""
    run, chance = tmp_path / "run", random.Random(2)
    recipe = in_folder(recipe_of(bench), run)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    for attempt in range(8):
        process = forked("train", str(path), output=tmp_path / f"output-{attempt}", cache=bench.cache)
        seen = last_step(run)
        if attempt % 4:
            wait_for(lambda p=process, s=seen: last_step(run) > s or not p.is_alive(), "another step")
        time.sleep(chance.uniform(0.0, 0.25))
        process.kill()
        process.join()
        newest = folder.newest(run)
        assert last_step(run) < 1 or newest is not None or not list(run.glob("checkpoints/step-*"))
    assert last_step(run) >= 5
    assert bench.train(recipe, world_size=2).error is None
    assert_one_run(run, uninterrupted)
    assert sorted(os.listdir(run / "checkpoints")) == [f"step-{STEPS - 1}", f"step-{STEPS}"]


def test_a_launcher_and_its_ranks(bench: Bench, tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """The launcher alone, one rank alone, all at once; then the same command again, at last on one rank."""
    run = tmp_path / "run"
    recipe = in_folder(recipe_of(bench), run)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    for victim in ("launcher", "rank", "all"):
        output = tmp_path / f"output-{victim}"
        seen = last_step(run)
        with started("train", str(path), "--nproc", "2", output=output, cache=bench.cache) as process:
            wait_for(lambda s=seen, p=process: last_step(run) >= max(1, s) + 2 or p.poll() is not None, "more steps")
            assert process.poll() is None, output.read_text(encoding="utf-8")
            ranks = children_of(process.pid)
            assert len(ranks) == 2
            kill(victim, process.pid, ranks)
            code = process.wait(60)
        wait_for(lambda r=ranks: not any(is_alive(pid) for pid in r), "the ranks to end")
        stands = last_step(run)
        time.sleep(0.5)
        assert last_step(run) == stands
        if victim == "rank":
            assert code == 1
            said = output.read_text(encoding="utf-8")
            assert said.count("meshtune:") == 1
            assert "rank 1 was killed by signal 9; the other ranks were stopped" in said
            assert "Traceback" not in said
    assert bench.train(recipe, world_size=1).error is None
    assert_one_run(run, uninterrupted)


@pytest.mark.parametrize(
    ("begin", "world_size", "end"),
    [({"tp_size": 2}, 1, {}), ({"pp_size": 2}, 2, {"strategy": "fsdp2"})],
    ids=["tp2-one", "pp2-fsdp2"],
)
def test_a_cut_model_is_killed_and_goes_on_elsewhere(
    bench: Bench,
    tmp_path: Path,
    uninterrupted: list[dict[str, Any]],
    begin: dict[str, Any],
    world_size: int,
    end: dict[str, Any],
) -> None:
    """Twice: at the second start on the same axes, then on another number of ranks or with others."""
    run = tmp_path / "run"
    path = write_recipe(tmp_path / "recipe.yaml", in_folder(recipe_of(bench, distributed=begin), run))
    for attempt in range(2):
        output, seen = tmp_path / f"output-{attempt}", last_step(run)
        with started("train", str(path), "--nproc", "2", output=output, cache=bench.cache) as process:
            wait_for(lambda s=seen, p=process: last_step(run) >= max(1, s) + 2 or p.poll() is not None, "more steps")
            assert process.poll() is None, output.read_text(encoding="utf-8")
            ranks = children_of(process.pid)
            kill("all", process.pid, ranks)
        wait_for(lambda r=ranks: not any(is_alive(pid) for pid in r), "the ranks to end")
    assert 5 <= last_step(run) < STEPS
    assert bench.train(in_folder(recipe_of(bench, distributed=end), run), world_size).error is None
    assert_one_run(run, uninterrupted, tolerance=1e-4)


def kill(victim: str, launcher: int, ranks: list[int]) -> None:
    pids = {"launcher": [launcher], "rank": [max(ranks)], "all": [launcher, *ranks]}[victim]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
