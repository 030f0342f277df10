"""What the user sees while training."""

from __future__ import annotations

import io

import pytest

from meshtune.observe import LoggingSection, Progress, make_progress
from meshtune.observe.progress import Eta, PlainProgress, RichProgress, describe

METRICS = {
    "epoch": 0.5,
    "loss": 2.12341,
    "grad_norm": 1.234,
    "learning_rate": 1e-5,
    "tokens_per_second": 1234.4,
    "mfu": None,
}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_lines() -> None:
    """One line for each logging step, validations and messages among them; nothing else."""
    stream = io.StringIO()
    with make_progress("plain", stream) as progress:
        progress.start(300, 10)
        progress.message("attention: sdpa")
        progress.update(12, METRICS)
        progress.validation(12, {"validation_loss": 2.0, "validation_tokens": 64})
    first, second, third = stream.getvalue().splitlines()
    assert first == "attention: sdpa"
    expected = "step 12/300  loss 2.1234  grad_norm 1.23  lr 1.0e-05  1,234 tok/s  eta "
    assert second.startswith(expected) and second.removeprefix(expected).count(":") == 2
    assert third == "step 12  validation_loss 2.0000"


def test_auto_is_live_on_a_terminal_only() -> None:
    """Plain lines where the output is a file or a pipe; what is asked for by name is taken as asked."""
    assert isinstance(make_progress("auto", Terminal()), RichProgress)
    assert isinstance(make_progress("auto", io.StringIO()), PlainProgress)
    assert isinstance(make_progress("plain", Terminal()), PlainProgress)
    assert isinstance(make_progress("rich", io.StringIO()), RichProgress)


def test_nothing_for_none_and_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Only rank 0 shows anything."""
    for progress in (LoggingSection(progress="none").build_progress(0), LoggingSection().build_progress(3)):
        assert type(progress) is Progress
        with progress:
            progress.start(10)
            progress.message("hello")
            progress.update(1, METRICS)
            progress.validation(1, METRICS)
    assert capsys.readouterr() == ("", "")
    assert isinstance(LoggingSection(progress="plain").build_progress(0), PlainProgress)


def test_the_live_display_shows_the_latest_state_and_keeps_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar, step of total, metrics and ETA; text in brackets is not markup; closing twice is fine."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = make_progress("auto", stream)
    progress.message("before [the] start")
    progress.start(300, 10)
    progress.update(12, METRICS)
    progress.validation(12, {"validation_loss": 2.0})
    progress.message("saved checkpoints/step-12 [red]")
    progress.close()
    progress.close()
    shown = stream.getvalue()
    for text in ("before [the] start", "step 12/300", "4%", "eta ", "loss 2.1234", "1,234 tok/s", "━"):
        assert text in shown
    assert "step 12  validation_loss 2.0000" in shown
    assert "saved checkpoints/step-12 [red]" in shown


def test_eta_follows_the_latest_pace() -> None:
    """A slow first step does not spoil the estimate for long, nor do the steps done before a resume count."""
    now = 0.0
    eta = Eta(1000, 500, clock=lambda: now)
    assert str(eta) == "-:--:--"
    now = 60.0
    eta.advance(501)
    assert str(eta) == "8:19:00"
    for step in range(502, 601):
        now += 2.0
        eta.advance(step)
    assert str(eta) == "0:13:20"
    eta.advance(1000)
    assert str(eta) == "0:00:00"


def test_unknown_values_are_left_out() -> None:
    """A metric that is missing or null takes no room; a NaN and a zero show."""
    metrics = {"loss": float("nan"), "grad_norm": None, "learning_rate": 0.0}
    assert describe(metrics) == ["loss nan", "lr 0.0e+00"]
