"""A run folder that cannot be written is refused before data are prepared and weights read: exit code 2, folder, reason."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtune.models import hf
from meshtune.recipes.run import Setup
from tests.cli.conftest import Said

Command = Callable[..., Said]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be mounted read-only: that stops root, too, unlike permission bits."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if (
        sys.platform != "linux"
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read that should not have been."""
    touched: list[str] = []
    prepare = Setup._prepare

    def load(*_: Any, **__: Any) -> None:
        touched.append("weights")

    def noted(self: Setup, plan: Any) -> Any:
        touched.append("rows")
        return prepare(self, plan)

    monkeypatch.setattr(hf, "load", load)
    monkeypatch.setattr(Setup, "_prepare", noted)
    return touched


def test_a_new_folder_on_a_read_only_disk(meshtune: Command, recipe: Path, disk: Path, unread: list[str]) -> None:
    remount(disk, "ro")
    run = disk / "runs" / "first"
    for command in ("train", "check"):
        said = meshtune(command, recipe, f"checkpoint.dir={run}")
        assert said.code == 2, said.err
        assert f"checkpoint.dir: the run folder {run} cannot be written (Read-only file system)" in said.err
        assert said.err.count("meshtune: ") == 1 and "Traceback" not in said.err
    assert unread == []


def test_a_run_that_was_begun_before(
    meshtune: Command, recipe: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it changes; when the disk can be written again, the same command goes on."""
    run = disk / "run"
    assert meshtune("train", recipe, f"checkpoint.dir={run}", "checkpoint.export=none").code == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    remount(disk, "ro")
    more = ("train", recipe, f"checkpoint.dir={run}", "checkpoint.export=none", "training.max_steps=4")
    with monkeypatch.context() as patched:
        patched.setattr(hf, "load", None)
        said = meshtune(*more)
    assert said.code == 2
    assert f"the run folder {run} cannot be written (Read-only file system)" in said.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    remount(disk, "rw")
    assert meshtune(*more).code == 0


def test_a_folder_of_checkpoints_elsewhere(
    meshtune: Command, recipe: Path, disk: Path, tmp_path: Path, unread: list[str]
) -> None:
    """The run folder can be written, but not the link in it, to a larger disk."""
    remount(disk, "ro")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    said = meshtune("train", recipe)
    assert said.code == 2
    assert f"{tmp_path / 'run' / 'checkpoints'} in the run folder cannot be written (Read-only file system)" in said.err
    assert unread == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_system_that_finds_out_late(
    meshtune: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: list[str], exists: bool
) -> None:
    """It says that the folder can be written, and refuses when it is: still before any weight is read."""
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    monkeypatch.setattr(os, "open", refusing(os.open, run))
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, run))
    said = meshtune("train", recipe)
    assert said.code == 2, said.err
    assert f"the run folder {run} cannot be written (Read-only file system)" in said.err
    assert said.err.count("meshtune: ") == 1 and "Traceback" not in said.err
    assert "weights" not in unread


def refusing(function: Callable[..., Any], run: Path) -> Callable[..., Any]:
    def refused(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).startswith(str(run)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return function(path, *arguments, **named)

    return refused


def test_a_path_through_a_file(meshtune: Command, recipe: Path, tmp_path: Path, unread: list[str]) -> None:
    (tmp_path / "file").write_text("dear", encoding="utf-8")
    said = meshtune("train", recipe, f"checkpoint.dir={tmp_path / 'file' / 'run'}")
    assert said.code == 2
    assert f"the run folder {tmp_path / 'file' / 'run'} cannot be written (Not a directory)" in said.err
    assert unread == []
