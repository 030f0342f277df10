"""What keeps less on the device changes time and memory, never a number.

The device here is the CPU, where these switches are refused, as they move what is there already; so the refusal is taken
away, and copies are copies all the same.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from tests.parity.conftest import Bench
from tests.parity.meshes import PP, SP, WEIGHTS, split
from tests.parity.runs import check_course, course, train


def train_offloaded(recipe: dict[str, Any], cache: str) -> tuple[int, int]:
    """Bytes that went to the memory of the CPU, and what of them were weights."""
    moved = [0, 0]

    class Watched:
        def __init__(self, pin_memory: bool, device_type: str):
            from torch.autograd.graph import save_on_cpu

            theirs = save_on_cpu(pin_memory=pin_memory, device_type=device_type)

            def pack(tensor: Tensor) -> Any:
                moved[0] += tensor.nbytes
                moved[1] += tensor.nbytes * (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter))
                return theirs.pack_hook(tensor)

            self.pack_hook, self.unpack_hook = pack, theirs.unpack_hook

    with (
        patch("meshtune.recipes.memory._on_device", return_value=()),
        patch("meshtune.parallel.activation_checkpointing.save_on_cpu", Watched),
    ):
        train(recipe, cache)
    return moved[0], moved[1]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ({"dp_shard": 2}, {}),
        ({**PP, "dp_shard": 1}, {"activation_checkpointing": "full", "activation_checkpointing_every": 2}),
        (SP, {"activation_checkpointing": "selective", "activation_checkpointing_keep": ["attention"]}),
    ],
    ids=["fsdp2-none", "pp2-every-second", "tp2+sp-attention"],
)
def test_offloaded_activations_come_back(bench: Bench, layout: dict[str, Any], mode: dict[str, Any]) -> None:
    section, world_size, readers = split(layout)
    training = {"activation_offload": True, "per_device_batch_size": 12 // readers // 3, **mode}
    recipe = bench.recipe(bench.model("qwen3"), True, distributed=section, training=training)
    del recipe["data"]["validation_path"]
    for moved, weights in bench.ranks.call(world_size, train_offloaded, recipe, bench.cache):
        assert moved > 100_000 and weights == 0
    check_course(course(recipe), bench.plain("qwen3", True).without_validation(), WEIGHTS)
