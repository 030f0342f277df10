"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of rank processes; `ranks.run(world_size, fn, *args)`."""
    pool = Ranks()
    yield pool
    pool.close()
