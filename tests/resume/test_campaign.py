"""A run to which one thing after the other happens, at random instants: at its end it is the run to which nothing happened.

MESHTUNE_CAMPAIGN_S makes it longer (seconds), MESHTUNE_CAMPAIGN_SEED another one; what happened is printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint import folder
from tests.resume.conftest import Bench
from tests.resume.processes import forked, last_step, wait_for, write_recipe
from tests.resume.runs import lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")

SECONDS = float(os.environ.get("MESHTUNE_CAMPAIGN_S", "15"))
SEED = int(os.environ.get("MESHTUNE_CAMPAIGN_SEED", "0"))
STEPS = 40


def recipe_of(bench: Bench, run: Path, seed: int) -> dict[str, Any]:
    return bench.recipe(
        bench.with_dropout(),
        run=run,
        data={"train_path": str(bench.train_path), "validation_path": str(bench.validation_path)},
        training={"max_steps": STEPS, "global_batch_size": 4, "eval_every_steps": 5},
        checkpoint={
            "every_steps": 1 + seed % 3,
            "keep": 3,
            "asynchronous": seed % 2 == 0,
            "best_metric": "validation_loss",
            "export": "none",
        },
    )


def newest_shard(run: Path) -> Path | None:
    """A shard of the newest checkpoint, where it is not the only one."""
    complete = folder.checkpoints(run)
    return next(complete[-1].path.glob("*.distcp")) if len(complete) > 1 else None


def cut(run: Path) -> None:
    if shard := newest_shard(run):
        os.truncate(shard, shard.stat().st_size // 2)


def lose(run: Path) -> None:
    if shard := newest_shard(run):
        shard.unlink()


def lose_the_manifest(run: Path) -> None:
    if shard := newest_shard(run):
        (shard.parent / folder.MANIFEST).unlink()


def litter(run: Path) -> None:
    """As half a save of another process, and half a pointer."""
    if complete := folder.newest(run):
        shutil.copytree(complete.path, run / "checkpoints" / ".step-99.feedbeef.incomplete", dirs_exist_ok=True)
        (run / "checkpoints" / folder.BEST).unlink(missing_ok=True)


def tear_the_metrics(run: Path) -> None:
    """A last line of which half is on the disk, as after a loss of power; lines before a checkpoint were there before it."""
    file, newest = run / "metrics.jsonl", folder.newest(run)
    if last_step(run) > (newest.step if newest else 0):
        os.truncate(file, file.stat().st_size - 10)


DAMAGE: list[Callable[[Path], None]] = [cut, lose, lose_the_manifest, litter, tear_the_metrics]


def test_a_run_that_everything_happens_to(bench: Bench, tmp_path: Path) -> None:
    chance, run = random.Random(SEED), tmp_path / "run"
    recipe = recipe_of(bench, run, SEED)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    deadline = None
    for attempt in range(1000):
        output, seen = tmp_path / "output", last_step(run)
        process = forked("train", str(path), output=output, cache=bench.cache)
        if chance.random() < 0.8:
            wait_for(lambda p=process, s=seen: last_step(run) > s or not p.is_alive(), "another step")
        delay, signum = chance.uniform(0.0, 0.4), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # it has done all steps meanwhile
            os.kill(process.pid or 0, signum)
        process.join(60)
        said = output.read_text(encoding="utf-8")
        assert process.exitcode in (0, -signum, 128 + signum), said
        damage = chance.choice([None, *DAMAGE])
        before = [complete.step for complete in folder.checkpoints(run)]
        print(f"{attempt}: {signum.name} {delay:.3f} s after step {seen}; {before}; {damage and damage.__name__}")
        if damage is not None:
            damage(run)
        assert len(folder.checkpoints(run)) >= len(before) - 1
        deadline = deadline or time.monotonic() + SECONDS  # the first start has loaded what the others find loaded
        if process.exitcode == 0 or time.monotonic() > deadline:
            break
    untouched = recipe_of(bench, tmp_path / "untouched", SEED)
    for each in (recipe, untouched):
        outcome = bench.train(each)
        assert outcome.error is None
    assert lines(run) == lines(tmp_path / "untouched")
    left, wanted = (sorted(os.listdir(folder_ / "checkpoints")) for folder_ in (run, tmp_path / "untouched"))
    assert set(wanted) <= {*left, "best.json"} and not any(name.startswith(".") for name in left)
