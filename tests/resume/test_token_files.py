"""Pretraining on token files, from the recipe to the checkpoint and on: the loss, other ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.recipes.recipe import Recipe
from meshtune.verify.miniature import documents_of
from tests.resume.conftest import Bench
from tests.resume.runs import lines, losses
from tests.unit.token_file_writers import write_megatron, write_raw

LENGTHS = [3, 30, 1, 17, 9, 2, 44, 12, 21, 5, 8, 33]
LONGEST = 16


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    bits = np.random.default_rng(4)
    return [bits.integers(1, 250, length).tolist() for length in LENGTHS]


def recipe_of(bench: Bench, path: str, **data: Any) -> dict[str, Any]:
    settings = {"train_path": path, "max_seq_length": LONGEST, "packing": True, **data}
    training = {"max_steps": 6, "global_batch_size": 4, "epochs": None}
    return bench.recipe(bench.model("qwen3"), recipe="pretrain", data=settings, training=training)


def test_the_first_loss_is_that_of_the_sequences_read_by_hand(
    bench: Bench, tmp_path: Path, documents: list[list[int]]
) -> None:
    """In file order the first batch is the first 4 x 16 tokens that are predicted, each document's part on its own."""
    path = write_megatron(tmp_path / "a.bin", documents)
    recipe = recipe_of(bench, path, shuffle=False, validation_path=path)
    assert bench.train(recipe).error is None
    assert [row["step"] for row in lines(Path(recipe["checkpoint"]["dir"])) if "validation_loss" in row] == [0, 6]
    model = AutoModelForCausalLM.from_pretrained(bench.model("qwen3"), dtype=torch.float32)
    left, sums, count = 4 * LONGEST, torch.zeros(()), 0
    at = 0  # places of the line of positions
    for document in documents:
        done = 0
        while done < len(document) - 1 and count < left:
            size = min(LONGEST - at % LONGEST, len(document) - 1 - done)
            part = torch.tensor([document[done : done + size + 1]])
            logits = model(part[:, :-1], use_cache=False).logits[0]
            sums = sums + F.cross_entropy(logits, part[0, 1:], reduction="sum")
            done, at, count = done + size, at + size, count + size
    assert count == left
    assert losses(Path(recipe["checkpoint"]["dir"]))[1] == pytest.approx(float(sums.detach()) / count, rel=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_goes_on_on_other_ranks(bench: Bench, tmp_path: Path, documents: list[list[int]], packing: bool) -> None:
    """Promise 6 and C67: over the epoch's border, from two ranks to one."""
    path = write_megatron(tmp_path / "a.bin", documents)
    straight, broken = (recipe_of(bench, path, packing=packing) for _ in range(2))
    assert bench.train(straight).error is None
    assert bench.train(broken, 2, stop_after=3).stopped_after == 3
    again = bench.train(broken)
    assert again.error is None and "resuming" in again.said
    found, wanted = (losses(Path(recipe["checkpoint"]["dir"])) for recipe in (broken, straight))
    assert found.keys() == wanted.keys() and found == pytest.approx(wanted, rel=1e-5)


def test_a_file_that_has_changed_is_refused_on_resuming(
    bench: Bench, tmp_path: Path, documents: list[list[int]]
) -> None:
    recipe = recipe_of(bench, write_megatron(tmp_path / "a.bin", documents))
    assert bench.train(recipe, stop_after=3).stopped_after == 3
    write_megatron(tmp_path / "a.bin", [[i % 249 + 1 for i in document] for document in documents])
    assert "was trained on other data" in str(bench.train(recipe).error)


def test_a_foreign_vocabulary_is_an_error_before_training(bench: Bench, tmp_path: Path) -> None:
    recipe = recipe_of(bench, write_raw(tmp_path / "a.bin", [1, 2, 3, 5000]))
    assert "data.train_path: " in (error := str(bench.train(recipe).error)) and "token 3 is 5000" in error
    assert not (Path(recipe["checkpoint"]["dir"]) / "metrics.jsonl").exists()


def test_verify_takes_its_documents_from_token_files_too(
    bench: Bench, tmp_path: Path, documents: list[list[int]]
) -> None:
    recipe = from_mapping(Recipe, recipe_of(bench, write_megatron(tmp_path / "a.bin", documents)))
    found = documents_of(recipe)
    assert [row.input_ids.tolist() for row in found] == [d[:32] for d in documents if len(d) > 1]
    assert all(row.supervised.all() for row in found)


def test_settings_that_no_token_file_reads_are_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2, 3])

    def refused(recipe: str = "pretrain", **data: Any) -> str:
        sections = {"model": {"name": "x"}, "data": {"train_path": path, **data}, "training": {"learning_rate": 0.1}}
        with pytest.raises(RecipeError) as error:
            from_mapping(Recipe, {"recipe": recipe, **sections})
        return str(error.value)

    assert "belong to `recipe: pretrain`" in refused("sft")
    assert "data.overlong: `drop` has no effect" in refused(overlong="drop")
    assert "data.token_dtype: has no effect" in refused(train_path="rows.jsonl", token_dtype="uint16")
    assert "data.document_separator: has no effect" in refused(train_path="rows.jsonl", document_separator="none")
