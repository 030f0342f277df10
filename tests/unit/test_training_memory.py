"""Memory that a step frees is there for the next one, never much more than it needs, and goes back at the end."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from meshtune.training.memory import KeptMemory, _resident_pages

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
FLOATS = 16 << 20
PAGES = 4 * FLOATS // resource.getpagesize()


def pages_of_a_tensor(size: int = FLOATS) -> int:
    """Pages that the system hands out for a tensor that lives for a moment."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@glibc
def test_freed_memory_is_taken_again_until_the_end() -> None:
    assert pages_of_a_tensor() > PAGES / 2
    before, kept = _resident_pages(), KeptMemory("cpu")
    kept.on_start()
    try:
        pages_of_a_tensor(2 * FLOATS)
        assert pages_of_a_tensor() < PAGES / 2
        assert _resident_pages() > before + PAGES
    finally:
        kept.on_end()
    assert _resident_pages() < before + PAGES / 2
    assert pages_of_a_tensor() > PAGES / 2


@glibc
def test_what_is_kept_is_bounded() -> None:
    """Each tensor is a little larger than the place that the one before has left, and something small stays behind it."""
    before, kept, left, most = _resident_pages(), KeptMemory("cpu"), [], 0
    kept.on_start()
    try:
        for step in range(24):
            pages_of_a_tensor(FLOATS + step * 4096)
            left.append(bytearray(3000))
            kept.bound()
            most = max(most, _resident_pages())
    finally:
        kept.on_end()
    assert most < 1.25 * (before + 6 * PAGES), "24 of them would be as many times the memory"


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


@glibc
def test_accelerators_have_an_allocator_of_their_own() -> None:
    kept = KeptMemory("cuda")
    kept.on_start()
    assert pages_of_a_tensor() > PAGES / 2
    kept.bound()
    kept.on_end()
