"""Loading shows one progress bar, on a terminal; a log gets none, whatever door the run came through."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from meshtune.models import hf
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from tests.parity.conversations import make_tokenizer
from tests.parity.models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bars") / "model", "llama", make_tokenizer())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are on, as in a process in which nobody has said anything of them."""
    monkeypatch.setattr(logging, "_tqdm_active", True)


def load(folder: Path) -> None:
    source = resolve(ModelSection(name=str(folder)))
    hf.load(hf.build(source, "eager"), source, torch.device("cpu"))


def test_a_log_gets_no_bar(folder: Path, shown: None, capsys: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_one(
    folder: Path, shown: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load(folder)
    assert capsys.readouterr().err.count("Loading weights: 100%") == 1


def test_bars_that_are_off_stay_off(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load(folder)
    assert capsys.readouterr().err == ""


def test_a_hook_of_the_users_is_asked_and_stays(
    folder: Path, shown: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    asked: list[Any] = []

    def hook(factory: Any, arguments: Any, named: Any) -> Any:
        asked.append(named["desc"])
        return factory(*arguments, **{**named, "disable": True})

    before = logging.set_tqdm_hook(hook)
    try:
        load(folder)
        assert asked == ["Loading weights"]
    finally:
        assert logging.set_tqdm_hook(before) is hook
