"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of rank processes; `ranks.call(world_size, function, *arguments)`."""
    with Ranks() as pool:
        yield pool
