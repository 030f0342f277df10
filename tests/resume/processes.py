"""`meshtune` in processes of its own, to be killed.

A single process comes from a fork server that has torch and transformers loaded, which makes it a matter of a second;
the launcher and its ranks are started as a user starts them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshtune.config import dump, from_mapping
from meshtune.recipes.recipe import Recipe
from tests.ranks import ROOT

PATIENCE_S = 120.0
PRELOADED = ["meshtune.cli", "meshtune.recipes.run", "meshtune.recipes.assembly", "meshtune.models.proofs"]
PRELOADED += ["meshtune.data.prepare", "meshtune.training.loop", "matplotlib.figure", "meshtune.verify.preload"]


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(dump(from_mapping(Recipe, recipe)), encoding="utf-8")
    return path


def forked(
    *arguments: str, output: Path, cache: str, before: Callable[[str], None] | None = None, note: Path | None = None
) -> BaseProcess:
    """Start `meshtune <arguments>` from the fork server; its output goes to a file. `before(note)` is called first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(
        target=_command, args=(list(arguments), str(output), cache, before, str(note)), daemon=True
    )
    process.start()
    return process


def _command(arguments: list[str], output: str, cache: str, before: Callable[[str], None] | None, note: str) -> None:
    import torch

    os.environ["MESHTUNE_CACHE"] = cache
    torch.set_num_threads(1)  # as in the pool of ranks, whose numbers are compared with these bit for bit
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["meshtune", *arguments]
    if before is not None:
        before(note)
    from meshtune.cli import main

    main()


@contextmanager
def started(
    *arguments: str, output: Path, cache: str, module: str = "meshtune", first: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command started as a user starts it; killed at the end if it still runs. `first` is a folder of modules that hide others,
    such as a sitecustomize.py that every process runs before all else."""
    path = os.pathsep.join(str(folder) for folder in (first, ROOT) if folder is not None)
    environment = {**os.environ, "MESHTUNE_CACHE": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with output.open("wb") as stream:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` returns once it is true. Fails the test if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.02)
    return found


def last_step(run_folder: Path) -> int:
    """The last whole line's step of metrics.jsonl; -1 where there is none."""
    try:
        content = (run_folder / "metrics.jsonl").read_bytes()
    except OSError:
        return -1
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    return json.loads(whole[-1])["step"] if whole else -1


def children_of(pid: int) -> list[int]:
    """Direct children, as Linux tells them."""
    files = Path(f"/proc/{pid}/task").glob("*/children")  # a thread's are its own
    return [int(child) for file in files for child in file.read_text(encoding="utf-8").split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
