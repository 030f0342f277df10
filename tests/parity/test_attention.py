"""Packed documents are isolated on every attention implementation (C29, C12), padded rows are masked on each."""

from __future__ import annotations

import pytest

from tests.parity.conftest import Bench
from tests.parity.runs import check_course


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_an_attention_implementation_trains_as_a_plain_loop(
    bench: Bench, attention: str, architecture: str, packed: bool
) -> None:
    recipe = bench.recipe(bench.model(architecture), packed, training={"per_device_batch_size": 4})
    recipe["model"]["attention"] = attention
    check_course(bench.run(1, recipe)[0], bench.plain(architecture, packed))
