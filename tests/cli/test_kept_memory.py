"""Memory that a step frees is there for the next one, never much more than it needs, and goes back at the end.

Seen in processes of their own, whose heaps no other test has used.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
from typing import Any

import pytest

from meshtune.training.memory import KeptMemory
from tests.ranks import ROOT

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
PAGES = (64 << 20) // resource.getpagesize()
PRELUDE = """
import json, resource, sys
import torch
from meshtune.training.memory import KeptMemory, _resident_pages as resident
def pages(megabytes, more=0):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones((megabytes << 18) + more)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept, seen = KeptMemory(sys.argv[1]), {"start": resident(), "before": pages(64)}
kept.on_start()
"""


def seen(script: str, device_type: str = "cpu") -> dict[str, Any]:
    command = [sys.executable, "-c", f"{PRELUDE}{script}\nprint(json.dumps(seen))", device_type]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return json.loads(done.stdout)


@glibc
def test_freed_memory_is_taken_again_until_the_end() -> None:
    script = """
seen["first"], seen["again"], seen["meanwhile"] = pages(128), min(pages(64) for _ in range(4)), resident()
kept.on_end()
seen["end"], seen["after"] = resident(), pages(64)
"""
    found = seen(script)
    assert found["before"] > PAGES / 2 and found["first"] > PAGES
    assert found["again"] < PAGES / 2 and found["meanwhile"] > found["start"] + PAGES
    assert found["after"] > PAGES / 2 and found["end"] < found["start"] + PAGES / 2


@glibc
def test_what_is_kept_is_bounded() -> None:
    """Pieces that lie free between what is in use go back, too."""
    script = """
for step in range(3):
    kept.bound()
pieces = [(torch.ones(8 << 18), torch.ones(1000)) for number in range(64)]
pieces = [small for large, small in pieces]
seen["kept"] = resident()
kept.bound()
seen["bounded"] = resident()
"""
    found = seen(script)
    assert found["kept"] > found["start"] + 6 * PAGES and found["bounded"] < found["start"] + PAGES


@glibc
def test_accelerators_have_an_allocator_of_their_own() -> None:
    found = seen('seen["again"] = pages(64); kept.bound(); kept.on_end()', "cuda")
    assert found["again"] > PAGES / 2


@glibc
def test_a_step_that_needs_more_is_no_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, trimmed = iter([100, 110, 100, 130, 140, 200, 200, 200, 210, 249]), []
    monkeypatch.setattr("meshtune.training.memory._resident_pages", lambda: next(pages))
    kept = KeptMemory("cpu")
    monkeypatch.setattr(kept, "_libc", type("Libc", (), {"malloc_trim": lambda _, pad: trimmed.append(pad)})())
    counts = []
    for _ in range(10):
        kept.bound()
        counts.append(len(trimmed))
    assert counts == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1], "limits: 137.5 of the first steps, then 250"
