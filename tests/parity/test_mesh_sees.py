"""The comparison with a plain loop fails where one sum over ranks is left out: it would be idle if it could not."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.parity.conftest import GLOBAL_BATCH, Bench
from tests.parity.meshes import PP, TP, WEIGHTS, split
from tests.parity.runs import check_course, course, train

# The layout, what is replaced, and what it returns then.
BROKEN: dict[str, tuple[dict[str, Any], str, Any]] = {
    "parts of the gradients of norms": (TP, "meshtune.parallel.tensor_gradients.TensorGradients.add_up", None),
    "parts of the gradient norm": (TP, "meshtune.parallel.running.named_pieces", {}),
    "gradients of tied weights": (PP, "meshtune.parallel.pipeline.sum_shared", None),
    "a tied weight that counts once": (PP, "meshtune.parallel.stages.Stages.counts", True),
}


def train_broken(recipe: dict[str, Any], cache: str, target: str, value: Any) -> None:
    with patch(target, return_value=value):
        train(recipe, cache)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_summed_is_seen(bench: Bench, name: str) -> None:
    """C50, C51, C55."""
    layout, target, value = BROKEN[name]
    section, world_size, _ = split(layout)
    training = {"per_device_batch_size": GLOBAL_BATCH // 3}
    recipe = bench.recipe(bench.model("qwen3"), True, distributed=section, training=training)
    bench.ranks.call(world_size, train_broken, recipe, bench.cache, target, value)
    with pytest.raises(AssertionError):
        check_course(course(recipe), bench.plain("qwen3", True), WEIGHTS)
