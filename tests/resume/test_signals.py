"""SIGTERM and SIGINT: a run saves, writes its report and leaves with 143 or 130; before training it leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshtune.checkpoint import folder
from meshtune.recipes import run as run_module
from meshtune.training import reporting
from tests.resume.conftest import Bench
from tests.resume.processes import children_of, forked, is_alive, last_step, started, wait_for, write_recipe
from tests.resume.runs import lines, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals processes and looks for them in /proc")

STEPS = 200


@pytest.fixture(scope="module")
def recipe(bench: Bench) -> dict[str, Any]:
    """Long enough that a signal always finds it training."""
    training = {"max_steps": STEPS, "global_batch_size": 4, "learning_rate": 1e-3}
    return bench.recipe(bench.model("llama"), training=training)


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    assert bench.train(recipe).error is None
    return lines(Path(recipe["checkpoint"]["dir"]))


def write(tmp_path: Path, recipe: dict[str, Any]) -> tuple[Path, Path]:
    """The recipe as a file, and its run folder."""
    run = tmp_path / "run"
    return write_recipe(tmp_path / "recipe.yaml", {**recipe, "checkpoint": {"dir": str(run), "export": "none"}}), run


def assert_left_cleanly(run: Path, said: str, name: str) -> None:
    """A checkpoint of the last step that was trained, a report of it, and one line that says so."""
    newest = folder.newest(run)
    assert newest is not None
    assert newest.step == last_step(run)
    assert said.count("meshtune:") == 1
    assert f"meshtune: left on {name} after step {newest.step}, with a checkpoint; run the same command again" in said
    assert "Traceback" not in said
    assert not list((run / "checkpoints").glob(".*"))
    report = (run / "report.html").read_text(encoding="utf-8")
    assert f"{newest.step}" in report
    assert (run / "loss.png").stat().st_mtime >= (newest.path / "manifest.json").stat().st_mtime


@pytest.mark.parametrize(("signum", "times"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_one_process(
    bench: Bench,
    recipe: dict[str, Any],
    uninterrupted: list[dict[str, Any]],
    tmp_path: Path,
    signum: signal.Signals,
    times: int,
) -> None:
    """Also on a second Ctrl-C; afterwards the run goes on to the same numbers, bit for bit."""
    path, run = write(tmp_path, recipe)
    output = tmp_path / "output"
    process = forked("train", str(path), output=output, cache=bench.cache)
    wait_for(lambda: last_step(run) >= 3 or not process.is_alive(), "a few steps")
    for _ in range(times):
        os.kill(process.pid or 0, signum)
        time.sleep(0.05)
    process.join(60)
    assert process.exitcode == 128 + signum
    assert_left_cleanly(run, output.read_text(encoding="utf-8"), signum.name)
    assert bench.train({**recipe, "checkpoint": {"dir": str(run), "export": "none"}}).error is None
    assert lines(run) == uninterrupted


def wait_in_preparation(note: str) -> None:
    """Data that takes its time."""

    def prepare(*_: Any) -> Any:
        Path(note).touch()
        time.sleep(300)

    run_module.Setup._prepare = prepare  # type: ignore[method-assign]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_before_training_it_leaves_at_once(
    bench: Bench, recipe: dict[str, Any], tmp_path: Path, signum: signal.Signals
) -> None:
    """An hour of tokenising need not be waited for; there is nothing to save yet, and no folder either."""
    path, run = write(tmp_path, recipe)
    output, note = tmp_path / "output", tmp_path / "preparing"
    process = forked("train", str(path), output=output, cache=bench.cache, before=wait_in_preparation, note=note)
    wait_for(note.exists, "the preparation of data")
    os.kill(process.pid or 0, signum)
    process.join(20)
    assert process.exitcode == 128 + signum
    said = output.read_text(encoding="utf-8")
    assert f"meshtune: left on {signum.name}\n" in said
    assert "Traceback" not in said
    assert not run.exists()


def leave_with_a_slow_report(recipe: dict[str, Any], cache: str) -> tuple[float, float]:
    """When this rank's report was written (0 where it writes none), and when its run ended; in seconds."""
    written = [0.0]

    def write_report(_: Path) -> None:
        time.sleep(1.0)
        written[0] = time.monotonic()

    original, reporting.write_report = reporting.write_report, write_report
    try:
        assert train(recipe, cache, stop_after=3).stopped_after == 3
    finally:
        reporting.write_report = original
    return written[0], time.monotonic()


def test_no_rank_leaves_before_the_report_is_written(bench: Bench, recipe: dict[str, Any], tmp_path: Path) -> None:
    """Launchers end every rank when the first has left, and torchrun kills those that take longer than 30 seconds."""
    recipe = {**recipe, "checkpoint": {"dir": str(tmp_path / "run"), "export": "none"}}
    first, second = bench.ranks.call(2, leave_with_a_slow_report, recipe, bench.cache)
    assert 0 < first[0] <= second[1]


def test_a_launcher_then_torchrun(
    bench: Bench, recipe: dict[str, Any], uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Ctrl-C, twice, on the launcher; SIGTERM on torchrun, whose exit code is its own; then the rest on one rank."""
    path, run = write(tmp_path, recipe)
    output = tmp_path / "launcher"
    with started("train", str(path), "--nproc", "2", output=output, cache=bench.cache) as process:
        wait_for(lambda: last_step(run) >= 3 or process.poll() is not None, "a few steps")
        ranks = children_of(process.pid)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.wait(60) == 130
    assert_left_cleanly(run, output.read_text(encoding="utf-8"), "SIGINT")
    assert not any(is_alive(pid) for pid in ranks)

    output, seen = tmp_path / "torchrun", last_step(run)
    torchrun = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "meshtune"]
    with started(*torchrun, "train", str(path), output=output, cache=bench.cache, module="torch.distributed.run") as it:
        wait_for(lambda: last_step(run) >= seen + 3 or it.poll() is not None, "a few more steps")
        it.terminate()
        assert it.wait(60) != 0
    assert_left_cleanly(run, meshtune_lines(output), "SIGTERM")
    assert last_step(run) > seen

    assert bench.train({**recipe, "checkpoint": {"dir": str(run), "export": "none"}}).error is None
    for row, reference in zip(lines(run), uninterrupted, strict=True):
        assert row == pytest.approx(reference, rel=1e-4)


def meshtune_lines(output: Path) -> str:
    """What the ranks said, without what torchrun has to say of it."""
    text = output.read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("meshtune:"))
