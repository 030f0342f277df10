"""Training through the real path, in the ranks of the pool: what a rank does, and what it leaves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from meshtune.config import from_mapping
from meshtune.layout.world import connect
from meshtune.layout.wrapped import unwrapped
from meshtune.models.causal_lm import CausalLM
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import Setup, run
from tests.parity.reference import Course

# Promise 1: float32 numbers agree to this, relative.
TOLERANCE = 1e-5


def train(recipe: dict[str, Any], cache: str) -> dict[str, str]:
    """Run a recipe on this rank; a digest of each parameter's bytes as this rank holds them afterwards."""
    os.environ["MESHTUNE_CACHE"] = cache
    # A quarter of the time of so short a run would go into its picture.
    with patch("meshtune.training.reporting.loss_png"):
        _, model = run(from_mapping(Recipe, recipe), "cpu")
    return digests(model)


def train_watched(recipe: dict[str, Any], cache: str, started: Callable[[CausalLM], None]) -> CausalLM:
    """`train` with a look at the model when setup is over and training begins. Returns the trained model."""
    os.environ["MESHTUNE_CACHE"] = cache
    with ExitStack() as held:
        setup = Setup(from_mapping(Recipe, recipe), connect("cpu"), held)
        setup.train(None, lambda: started(setup.model))
    return setup.model


def digests(model: nn.Module) -> dict[str, str]:
    """Name of each parameter to the dtype and a hash of the part that this rank holds."""
    found = {}
    for name, parameter in model.named_parameters():
        parameter = unwrapped(parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        content = local.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = f"{local.dtype} {hashlib.sha256(content).hexdigest()}"
    return found


def records(recipe: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that have `key`."""
    path = Path(recipe["checkpoint"]["dir"]) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [record for line in lines if key in (record := json.loads(line))]


def course(recipe: dict[str, Any]) -> Course:
    """What a run wrote, in the form of the plain loop; weights from the export, read by transformers."""
    steps = records(recipe, "loss")
    names = ("loss", "grad_norm", "learning_rate", "supervised_tokens")
    return Course(
        **{name: [record[name] for record in steps] for name in names},
        validation_loss=[record["validation_loss"] for record in records(recipe, "validation_loss")],
        weights=exported_weights(Path(recipe["checkpoint"]["dir"]) / "export"),
    )


def exported_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder, as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def check_course(found: Course, wanted: Course, weights: float = TOLERANCE, numbers: float = TOLERANCE) -> None:
    """Every loss, gradient norm, learning rate and count, and, to another tolerance, every weight after the last step."""
    assert found.supervised_tokens == wanted.supervised_tokens
    assert found.learning_rate == pytest.approx(wanted.learning_rate, rel=1e-12)
    for name in ("loss", "grad_norm", "validation_loss"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=numbers), name
    assert set(found.weights) == set(wanted.weights)
    errors = {
        name: ((found.weights[name] - weight).norm() / weight.norm()).item() for name, weight in wanted.weights.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= weights}
    assert not wrong, wrong
