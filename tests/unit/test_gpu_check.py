"""The script for a machine with a GPU, as far as a machine without one can try it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Row
from meshtune.config import from_mapping
from meshtune.recipes.recipe import Recipe

ASKED = argparse.Namespace(device="cuda", steps=8, attention="auto")


@pytest.mark.parametrize("shape", gpu_check.SHAPES)
def test_every_recipe_is_one(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the 8B shape needs to fit on a card of 80 GB, all is asked for."""
    monkeypatch.setattr(gpu_check, "_multiplies_in_fp8", lambda device: True)
    found = {}
    for name, changes in gpu_check._variants(shape, ASKED):
        found[name] = from_mapping(Recipe, gpu_check._recipe(tmp_path / shape, name, changes, ASKED))
    assert {recipe.training.compile for recipe in found.values()} == {False, True}
    precisions = {"bf16", "fp32"} if shape in gpu_check.LARGE else {"bf16", "fp32", "fp16", "fp8"}
    assert {recipe.training.precision for recipe in found.values()} == precisions
    assert len({recipe.checkpoint.dir for recipe in found.values()}) == len(found)
    if shape in gpu_check.LARGE:
        assert all(recipe.training.activation_checkpointing == "full" for recipe in found.values())
        assert all(
            recipe.model.dtype == "bfloat16" or (recipe.optimizer.name == "sgd" and recipe.training.max_steps == 1)
            for recipe in found.values()
        )
    else:
        assert [name for name in found if "flex" in name] == [f"{shape} bf16, flex"]


def test_what_fails_is_said_and_what_is_late_is_left_out(tmp_path: Path) -> None:
    """In the words of the process that failed."""
    (tmp_path / "tiny").mkdir()
    recipe = gpu_check._recipe(tmp_path / "tiny", "x", {}, ASKED)
    found = gpu_check._in_a_process(tmp_path / "tiny", recipe, "cpu", time.monotonic() + 120)
    assert isinstance(found, str) and found.startswith("failed: ") and str(tmp_path / "tiny") in found
    assert "time is over" in str(gpu_check._in_a_process(tmp_path / "tiny", recipe, "cpu", time.monotonic() - 1))
    assert "time is over" in str(gpu_check._in_a_process(tmp_path / "tiny", recipe, "cpu", time.monotonic() + 0.05))


def test_losses_stand_beside_those_of_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    def row(*loss: float) -> Row:
        return Row("a card", list(loss), None, None, 1.0, "sdpa")

    gpu_check._beside_fp32("8b", {"8b bf16": row(2.0, 1.0), "8b fp32, one step": row(2.25)})
    assert "8b: the losses of 1 step in bf16 are within 0.2500 of fp32's" in capsys.readouterr().out
    gpu_check._beside_fp32("1b", {"1b bf16": row(2.0, 1.0), "1b fp32": row(2.25, 1.5), "8b fp32": row(9.0)})
    assert "1b: the losses of 2 steps in bf16 are within 0.5000 of fp32's" in capsys.readouterr().out
    gpu_check._beside_fp32("8b", {"8b bf16": row(2.0)})
    assert capsys.readouterr().out == ""
