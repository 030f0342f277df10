"""0 done; 2 an error found before training; 1 a failure in training; 130 and 143 on a signal; each said once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshtune.cli import app, outcome
from meshtune.errors import CheckpointError, DataError, TrainingError
from meshtune.launch import local, rank
from meshtune.training.signals import Interrupted
from tests.cli.conftest import Said
from tests.ranks import ROOT

Command = Callable[..., Said]


def test_done(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    said = meshtune("train", recipe)
    assert said.code == 0, said.err
    for line in ("done, 3 steps", f"model       {tmp_path / 'run' / 'export'}", "loss curve", "report.html"):
        assert line in said.out
    assert said.err == ""


def test_a_loss_that_is_not_finite(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    """A failure in training: the report is written, no checkpoint of it is, and no traceback buries the reason."""
    said = meshtune("train", recipe, "training.learning_rate=1e30", "training.max_grad_norm=null")
    assert said.code == 1
    assert said.err.count("meshtune: ") == 1
    assert "error: step 2: loss is " in said.err
    assert "Lower training.learning_rate" in said.err
    assert "Traceback" not in said.err
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_metrics_that_cannot_be_written(
    meshtune: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C71: the disk is full for the smallest file too; said with the folder, and the report's own failure hides nothing."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("meshtune.observe.JSONLSink.write", full)
    monkeypatch.setattr("meshtune.training.reporting.write_report", full)
    said = meshtune("train", recipe)
    assert said.code == 1
    assert f"the metrics of step 1 could not be written into {tmp_path / 'run'}: [Errno 28] No space left" in said.err
    assert said.err.count("meshtune: ") == 1
    assert "Traceback" not in said.err


def ended_by(error: BaseException, training: bool) -> tuple[int, str]:
    """The exit code of a command in which `error` is raised, and what it says."""

    @app.command("fail")
    def fail() -> None:
        with outcome.exits() as phase:
            if training:
                phase.begin_training()
            raise error

    try:
        result = CliRunner().invoke(app, ["fail"])
    finally:
        app.registered_commands.pop()
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("error", "before", "within", "says"),
    [
        (DataError("row 3 is odd"), 2, 1, "meshtune: error: row 3 is odd"),
        (CheckpointError("no room"), 2, 1, "meshtune: error: no room"),
        (TrainingError("loss is nan"), 2, 1, "meshtune: error: loss is nan"),
        (OSError("no space for the export"), 2, 1, "meshtune: error: OSError: no space for the export"),
        (ValueError("a bug"), 2, 1, "meshtune: error: ValueError: a bug"),
        (KeyboardInterrupt(), 130, 130, "meshtune: left "),
        (SystemExit(143), 143, 143, "meshtune: left "),
        (Interrupted(signal.SIGTERM, 4), 143, 143, "meshtune: left on SIGTERM after step 4, with a checkpoint"),
    ],
)
def test_every_error_has_its_code(error: BaseException, before: int, within: int, says: str) -> None:
    for training, code in ((False, before), (True, within)):
        found, said = ended_by(error, training)
        assert found == code
        assert said.startswith(says)
        assert ("Traceback" in said) == isinstance(error, ValueError)


def test_sigterm_has_its_own_meaning_only_inside() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    ended_by(DataError("odd"), training=False)
    assert signal.getsignal(signal.SIGTERM) == handler


# --- several ranks --------------------------------------------------------------------------------------------------


def as_rank(monkeypatch: pytest.MonkeyPatch, number: int, folder: Path | None) -> None:
    monkeypatch.setenv("RANK", str(number))
    if folder is not None:
        monkeypatch.setenv(rank.FOLDER, str(folder))


def test_ranks_of_a_launcher_say_a_thing_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever comes first: the launcher ends the others as soon as one has left."""
    for number, said in ((1, "meshtune: error: loss is nan\n"), (0, "")):
        as_rank(monkeypatch, number, tmp_path)
        assert ended_by(TrainingError("loss is nan"), training=True) == (1, said)
    assert [end.code for end in rank.ended(tmp_path)] == [1, 1]


def test_ranks_of_torchrun_leave_the_word_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "_AFTER_RANK_0_S", 0.0)
    for number, said in ((1, ""), (0, "meshtune: error: loss is nan\n")):
        as_rank(monkeypatch, number, None)
        assert ended_by(TrainingError("loss is nan"), training=True) == (1, said)


def test_what_one_rank_alone_has_to_say_bears_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1, None)
    assert ended_by(DataError("my disk"), training=True) == (1, "meshtune: rank 1: error: my disk\n")


def test_a_rank_that_lost_another_lets_the_launcher_speak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher knows who died, and of what; it repeats the rank's reason only where nobody did."""
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    as_rank(monkeypatch, 0, tmp_path)
    assert ended_by(lost, training=True) == (1, "")
    assert local._exit_code(tmp_path, failed({1: -9})) == 1
    assert capfd.readouterr().err == "meshtune: rank 1 was killed by signal 9; the other ranks were stopped\n"
    assert local._exit_code(tmp_path, failed({0: 1})) == 1
    assert "meshtune: rank 0 lost contact with another rank ([/pytorch" in capfd.readouterr().err


def test_a_rank_that_was_ended_for_another_does_not_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank is killed while the run is set up; the launcher's SIGTERM to the rest is not the user's."""
    as_rank(monkeypatch, 0, tmp_path)
    assert ended_by(SystemExit(143), training=False) == (143, "")
    assert local._exit_code(tmp_path, failed({1: -9})) == 1
    assert capfd.readouterr().err == "meshtune: rank 1 was killed by signal 9; the other ranks were stopped\n"
    assert local._exit_code(tmp_path, failed({0: 143})) == 143
    assert capfd.readouterr().err == "meshtune: left on SIGTERM\n"
    as_rank(monkeypatch, 1, tmp_path)
    ended_by(DataError("row 3 is odd"), training=False)
    assert local._exit_code(tmp_path, failed({0: 143, 1: 2})) == 2


def failed(codes: dict[int, int]) -> Exception:
    """What torch elastic raises."""
    from types import SimpleNamespace

    error = RuntimeError("failed")
    error.failures = {number: SimpleNamespace(exitcode=code) for number, code in codes.items()}  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("codes", "code", "says"),
    [
        ({0: -9, 1: -9}, 1, "rank 0 was killed by signal 9 and rank 1 was killed by signal 9"),
        ({1: 77}, 1, "rank 1 ended with exit code 77"),
        ({}, 1, "the ranks could not be started: RuntimeError: failed"),
    ],
)
def test_the_launcher_says_what_no_rank_could(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], codes: dict[int, int], code: int, says: str
) -> None:
    assert local._exit_code(tmp_path, failed(codes)) == code
    assert says in capfd.readouterr().err


def test_an_error_before_training_on_two_ranks(things: Path, recipe: Path, tmp_path: Path) -> None:
    """A real launcher: one message, and no other library's beside it, exit code 2, and nobody left waiting."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"conversations": []}\n' * 4, encoding="utf-8")
    done = command("train", recipe, "--nproc", 2, f"data.train_path={data}", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.startswith("meshtune: ") and done.stderr.count("meshtune: ") == 1
    assert "conversations" in done.stderr
    assert "torchao" not in done.stderr and "register_constant" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def command(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshtune", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "MESHTUNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


# --- signals on their way to the ranks ------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that notes SIGINT and sleeps on, known to the launcher as rank 0."""
    code = "import signal, time\nsignal.signal(2, lambda *_: print('got it', flush=True))\nprint('up', flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", code + "while True: time.sleep(0.1)"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    (tmp_path / "rank-0.pid").write_text(str(process.pid), encoding="utf-8")
    return process


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_the_third_ctrl_c_ends_everything(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    try:
        with local._PassedOn(local._Ranks(tmp_path)):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                assert sleeper.stdout is not None
                assert sleeper.stdout.readline() == b"got it\n"
            with pytest.raises(SystemExit) as left:
                signal.raise_signal(signal.SIGINT)
            assert left.value.code == 130
        assert sleeper.wait(20) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_is_there_ends_the_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    with local._PassedOn(local._Ranks(tmp_path)), pytest.raises(SystemExit) as left:
        signal.raise_signal(signum)
    assert left.value.code == 128 + signum


@pytest.mark.skipif(os.name != "posix", reason="Windows does not tell a process that its parent has gone")
@pytest.mark.parametrize("who", ["meshtune", "torchrun"])
def test_a_rank_does_not_outlive_its_launcher(tmp_path: Path, who: str) -> None:
    """It would go on writing into a run folder that another run has taken."""
    names = f"MESHTUNE_LAUNCH_FOLDER='{tmp_path}', MESHTUNE_LAUNCHER_PID=str(os.getppid())"
    names = names if who == "meshtune" else "TORCHELASTIC_RUN_ID='x'"
    rank_code = (
        f"import os, time; os.environ.update(RANK='0', {names}); "
        "from meshtune.launch.rank import report_for_duty; report_for_duty(); print(os.getpid(), flush=True); "
        "time.sleep(60)"
    )
    launcher_code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank_code!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", launcher_code], stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline()) > 0
        launcher.kill()
        # The pipe closes when the last process that holds it has ended.
        start = time.monotonic()
        assert launcher.stdout.read() == b""
        assert time.monotonic() - start < 20
