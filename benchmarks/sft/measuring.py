"""One contender in a process of its own, and what it took."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

SKIPPED_STEPS = 2


@dataclass
class Measured:
    """One run of a contender."""

    tokens_per_second: float
    supervised_per_second: float
    per_cpu_second: float
    """Tokens: what a machine that others use as well does not change much."""
    peak_gb: float
    first_step_s: float


def measure(name: str, command: list[str], root: Path, threads: int) -> Measured:
    """Run a contender's `command`, which works in the folder `root`, and watch it."""
    for left in ("run", "out", "cache", "hf", "steps.jsonl"):
        path = root / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    places = {"MESHTUNE_CACHE": str(root / "cache"), "HF_DATASETS_CACHE": str(root / "hf")}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error", **places}
    begun = time.time()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watch = Watch(process.pid, root / "run" / "metrics.jsonl", root / "steps.jsonl")
    said = process.communicate()[1]
    watch.stop()
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}:\n{said.decode()[-3000:]}")
    return watch.measured(begun)


class Watch(threading.Thread):
    """Looks at a process and its children twenty times a second: their resident memory, and when a step got its line, in what
    meshtune logs or in what another contender writes, and how many seconds of CPU they had spent by then."""

    def __init__(self, pid: int, metrics: Path, steps: Path):
        super().__init__(daemon=True)
        self._process, self._ended = psutil.Process(pid), threading.Event()
        self._metrics, self._steps = metrics, steps
        self._peak, self._cpu, self._times, self._cpus = 0, 0.0, [], []
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            self._look()

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._look()

    def _look(self) -> None:
        try:
            family = [self._process, *self._process.children(recursive=True)]
            self._peak = max(self._peak, sum(one.memory_info().rss for one in family))
            self._cpu = sum(sum(one.cpu_times()[:2]) for one in family)
        except psutil.Error:
            pass
        found = next((file for file in (self._metrics, self._steps) if file.exists()), None)
        new = 0 if found is None else found.read_text(encoding="utf-8").count("\n") - len(self._times)
        self._times += [time.time()] * new
        self._cpus += [self._cpu] * new

    def measured(self, begun: float) -> Measured:
        if self._metrics.exists():
            rows = [json.loads(line) for line in self._metrics.read_text(encoding="utf-8").splitlines()]
            tokens, supervised = ([row[key] for row in rows] for key in ("tokens", "supervised_tokens"))
            # Its own clock for the steps: this thread looks only every so often.
            seconds, first = [row["step_time_s"] for row in rows], self._times[0]
        else:
            rows = [json.loads(line) for line in self._steps.read_text(encoding="utf-8").splitlines()]
            tokens, supervised = ([row[key] for row in rows] for key in ("tokens", "supervised"))
            times = [begun, *(row["time"] for row in rows)]
            seconds, first = [after - before for before, after in pairwise(times)], rows[0]["time"]
        spent = sum(seconds[SKIPPED_STEPS:])
        rates = (sum(counts[SKIPPED_STEPS:]) / spent for counts in (tokens, supervised))
        cpu = self._cpus[len(seconds) - 1] - self._cpus[SKIPPED_STEPS - 1]
        return Measured(*rates, sum(tokens[SKIPPED_STEPS:]) / cpu, self._peak / 1e9, first - begun)


def report(results: dict[str, list[Measured]]) -> None:
    """Medians; ratios of each turn, lowest to highest."""
    names = [one.name for one in fields(Measured)]
    print(f"{'':17} {'tokens/s':>9} {'supervised/s':>13} {'per CPU s':>10} {'peak GB':>8} {'first step s':>13}")
    for name, runs in results.items():
        middle = [median(getattr(run, key) for run in runs) for key in names]
        rates = f"{middle[0]:9.0f} {middle[1]:13.0f} {middle[2]:10.0f}"
        print(f"{name:17} {rates} {middle[3]:8.2f} {middle[4]:13.1f}")
    if "meshtune" not in results:
        return
    print("\nmeshtune is so many times as quick (tokens/s; per CPU second), as large (peak), as late (first step) as:")
    for name, runs in results.items():
        if name != "meshtune":
            pairs = list(zip(results["meshtune"], runs, strict=True))
            told = [_spread([getattr(a, key) / getattr(b, key) for a, b in pairs]) for key in (names[0], *names[2:])]
            print(f"{name:17} " + " ".join(f"{ratio:>18}" for ratio in told))


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, int(value)
