"""Fixtures of the whole suite, and what keeps it quick."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Models of a few thousand numbers: a second thread waits more than it helps. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """What has been imported stays to the end: the garbage collector need not walk through it again and again, and each walk
    through what models are made of takes longer than most tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of rank processes; `ranks.call(world_size, function, *arguments)`."""
    from tests.ranks import Ranks

    with Ranks() as pool:
        yield pool
