"""Packed documents are isolated, and padding is masked, by every attention implementation (C29, C12)."""

from __future__ import annotations

import pytest
import torch

from meshtune.errors import ModelError
from meshtune.models.proofs import choose_attention
from tests.parity.conftest import Bench
from tests.parity.runs import check_course
from tests.unit.models_tiny import tiny_source


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("phi3", "eager"), ("phi3", "sdpa"), ("gemma2", "eager")],
)
def test_an_attention_implementation_trains_as_a_plain_loop(
    bench: Bench, architecture: str, attention: str, packed: bool
) -> None:
    """With and without windows and soft-capped scores. What `auto` chooses is met by every other test."""
    recipe = bench.recipe(bench.model(architecture), packed, training={"per_device_batch_size": 4})
    recipe["model"]["attention"] = attention
    check_course(bench.run(1, recipe)[0], bench.plain(architecture, packed))


def test_flex_attention_has_no_backward_on_the_cpu_and_says_so() -> None:
    """Compiled for this alone, which takes seconds."""
    with pytest.raises(ModelError, match="FlexAttention does not support backward on CPU"):
        choose_attention(
            tiny_source("llama", "flex_attention", num_hidden_layers=1), True, torch.device("cpu"), torch.float32
        )
