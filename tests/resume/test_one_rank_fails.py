"""One rank fails: all of them end soon, and what the user reads last is why the first one did."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint import folder
from tests.ranks import ROOT
from tests.resume.conftest import Bench
from tests.resume.processes import children_of, is_alive, last_step, started, wait_for, write_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

LIMIT_S = 30.0
PATIENCE_S = 6.0
"""`distributed.timeout_minutes`, until which nobody can know that a rank will not come."""

# Run by each process before all else; of rank 1, a step goes wrong.
FAULT = """
import os
if os.environ.get("RANK") == "1":
    import meshtune.training.step as module
    call = module.TrainStep.__call__
    def step(self, batches, step, rate):
        if step == 5:
            open({note!r}, "w").close()
            {fault}
        return call(self, batches, step, rate)
    module.TrainStep.__call__ = step
"""


@pytest.mark.parametrize(
    ("fault", "asynchronous", "says"),
    [
        (
            "raise ZeroDivisionError('of this rank alone')",
            True,
            "meshtune: rank 1: error: ZeroDivisionError: of this rank alone",
        ),
        ("os._exit(7)", False, "meshtune: rank 1 ended with exit code 7; the other ranks were stopped"),
        ("__import__('time').sleep(600)", False, "meshtune: rank 1 did not come to where the others waited ("),
        ("os.kill(os.getpid(), 19)", True, "meshtune: rank 1 did not come to where the others waited ("),
    ],
    ids=["error", "exit", "hangs", "stopped"],
)
def test_all_ranks_end_and_the_first_error_is_told(
    bench: Bench, tmp_path: Path, fault: str, asynchronous: bool, says: str
) -> None:
    """Within 30 seconds, with exit code 1, and with the checkpoints before it whole, also one that was being written."""
    run, note, output = tmp_path / "run", tmp_path / "note", tmp_path / "output"
    keeping = {"every_steps": 1, "asynchronous": asynchronous, "dir": str(run), "export": "none"}
    recipe = {**bench.recipe(bench.model("llama")), "checkpoint": keeping}
    recipe["distributed"]["timeout_minutes"] = PATIENCE_S / 60
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    (tmp_path / "first").mkdir()
    code = FAULT.format(note=str(note), fault=fault)
    (tmp_path / "first" / "sitecustomize.py").write_text(code, encoding="utf-8")
    arguments: dict[str, Any] = {"output": output, "cache": bench.cache, "first": tmp_path / "first"}
    with started("train", str(path), "--nproc", "2", **arguments) as process:
        wait_for(lambda: note.exists() or process.poll() is not None, "the fault")
        failed_at, ranks = time.monotonic(), children_of(process.pid)
        assert process.wait(60) == 1, output.read_text(encoding="utf-8")
        assert time.monotonic() - failed_at < LIMIT_S + (PATIENCE_S if "waited" in says else 0.0)
    assert not any(is_alive(pid) for pid in ranks)
    said = output.read_text(encoding="utf-8")
    assert said.count("meshtune:") == 1
    assert says in said
    last = [line for line in said.splitlines() if line.strip()][-1]
    assert last.startswith("meshtune:") or last == "ZeroDivisionError: of this rank alone"
    newest = folder.newest(run)
    assert newest is not None and newest.step in (4, 5)
    assert last_step(run) == 5


def ask(absent: list[int], in_vain: bool = True) -> tuple[list[int], float]:
    import torch.distributed as dist

    from meshtune.layout.absent import absent_ranks

    begun = time.monotonic()
    found = [] if dist.get_rank() in absent else absent_ranks(in_vain)
    dist.barrier()
    return found, time.monotonic() - begun


def test_who_did_not_come_is_known_to_all_that_did(bench: Bench) -> None:
    """And at once where all have come: a collective that failed by itself blames nobody."""
    answers = bench.ranks.call(4, ask, [1, 2])
    assert [found for found, _ in answers] == [[1, 2], [], [], [1, 2]]
    answers = bench.ranks.call(2, ask, [])
    assert [found for found, _ in answers] == [[], []]
    assert max(seconds for _, seconds in answers) < 2.0
    answers = bench.ranks.call(2, ask, [1], False)
    assert [found for found, _ in answers] == [[], []], "one whose peer has died knows of it already"
    assert max(seconds for _, seconds in answers) < 2.0


# A launcher whose ranks are not meshtune: one dies, the other hears nothing of it and heeds no SIGTERM.
LAUNCHER = """
import sys
import meshtune.launch.local as local
local._GRACE_S = 1.0
sys.executable = {rank!r}
raise SystemExit(local.launch(2, []))
"""
RANK = """#!{python}
import os, signal, sys, time
sys.path.insert(0, {root!r})
from meshtune.launch.rank import report_exit, report_for_duty
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report_for_duty()
if os.environ["RANK"] == "1":
    time.sleep(1)
    {end}
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("end", "says"),
    [("os.kill(os.getpid(), 9)", "rank 1 was killed by signal 9"), ("report_exit(1); os._exit(1)", "")],
    ids=["killed", "error"],
)
def test_a_rank_that_waits_for_ever_is_killed(tmp_path: Path, end: str, says: str) -> None:
    """As one does that sits in a collective of NCCL with a dead peer."""
    rank = tmp_path / "rank"
    rank.write_text(RANK.format(python=sys.executable, root=str(ROOT), end=end), encoding="utf-8")
    rank.chmod(0o755)
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER.format(rank=str(rank)))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - begun < LIMIT_S


def test_ranks_that_end_well_are_waited_for(tmp_path: Path) -> None:
    """However long the last one takes: rank 0 may have an export to write when the others have left."""
    rank = tmp_path / "rank"
    end = "report_exit(0); os._exit(0)"
    text = RANK.format(python=sys.executable, root=str(ROOT), end=end).replace("time.sleep(300)", "time.sleep(6)")
    rank.write_text(text, encoding="utf-8")
    rank.chmod(0o755)
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER.format(rank=str(rank)))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
