"""Sequences of 131,072 tokens: no tensor of a step grows with the square of the length, packed or in one document."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshtune.models.scores import Scores, attend_in_documents
from tests.parity.conftest import Bench
from tests.parity.runs import records, train_watched
from tests.parity.test_memory import LargestTensor
from tests.unit.token_file_writers import write_megatron

LONGEST = 131_072
WIDEST = 260  # values for a token: the logits, a chunk of which is the largest tensor


def train_measured(recipe: dict[str, Any], cache: str) -> int:
    """Elements of the largest tensor that training made on this rank."""
    largest = LargestTensor()
    with ExitStack() as stack:
        train_watched(recipe, cache, lambda _: stack.enter_context(largest))
    return largest.elements


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_pack_of_131072_tokens_is_trained_on_in_linear_memory(
    bench: Bench, tmp_path: Path, architecture: str
) -> None:
    """A mask over it would have 1.7 * 10^10 elements. Documents of 300 to 500 tokens; one model has windows of 5."""
    bits = np.random.default_rng(0)
    documents = [bits.integers(1, 250, length).tolist() for length in bits.integers(300, 500, 400)]
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4, "intermediate_size": 16, "vocab_size": 260}
    model = bench.model(architecture, "long", max_position_embeddings=LONGEST, **sizes)
    recipe = bench.recipe(
        model,
        True,
        training={"global_batch_size": 1, "max_steps": 1},
        checkpoint={"export": "none"},
    )
    recipe["data"] = {
        "train_path": write_megatron(tmp_path / "a.bin", documents),
        "max_seq_length": LONGEST,
        "packing": True,
        "shuffle": False,
    }
    elements = bench.ranks.call(1, train_measured, {**recipe, "recipe": "pretrain"}, bench.cache)[0]
    assert records(recipe, "loss")[0]["tokens"] == LONGEST
    assert LONGEST <= elements <= WIDEST * LONGEST


@pytest.mark.parametrize("scores", [Scores(), Scores(window=64), Scores(softcap=20.0)], ids=["causal", "window", "cap"])
def test_attention_in_a_long_document_makes_no_square(scores: Scores) -> None:
    """One document alone: with a kernel for it, or by blocks of queries where there is none."""
    length = 8192
    largest = LargestTensor()
    q, k, v = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
    with largest:
        attend_in_documents(q, k, v, scores, [length - 1, 1]).sum().backward()
    assert largest.elements < length * length / 8
