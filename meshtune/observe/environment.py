"""What a run ran with: versions, device, the state of the user's repository."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("meshtune", "torch", "transformers", "datasets", "safetensors")


def environment(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """A JSON-ready description of this process; what cannot be found out is None.

    `directory` (the working directory by default) is where git is asked. `git.dirty` says that a tracked file
    differs from the commit; untracked files, such as the run folder itself, do not count."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "device": _device(),
        "git": _git_state(directory or os.getcwd()),
        "command": shlex.join(sys.argv),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator else "cpu"
    if kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        return {
            "type": kind,
            "name": module.get_device_name(),
            "count": module.device_count(),
            "runtime": torch.version.hip or torch.version.cuda,
        }
    return {"type": kind, "name": _cpu_name(), "count": os.cpu_count()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name and name != "unknown"), platform.processor() or platform.machine())


def _git_state(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Commit and dirty flag, or None outside a repository and where git is missing."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(directory: str | os.PathLike[str], *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
