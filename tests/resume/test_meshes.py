"""C69 where a model or a sequence is cut: a run goes on with other axes, on the same course, from the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.resume.conftest import Bench
from tests.resume.runs import checkpoint, lines, tensors
from tests.resume.test_layouts import travel

STEPS, STOP = 6, 3
ONE: tuple[int, dict[str, Any]] = (1, {})
TP2: tuple[int, dict[str, Any]] = (2, {"tp_size": 2})
PP2: tuple[int, dict[str, Any]] = (2, {"pp_size": 2})
CP2: tuple[int, dict[str, Any]] = (2, {"cp_size": 2})
EP2: tuple[int, dict[str, Any]] = (2, {"ep_size": 2})
FSDP2: tuple[int, dict[str, Any]] = (2, {"strategy": "fsdp2"})
DDP2: tuple[int, dict[str, Any]] = (2, {"strategy": "ddp"})
FSDP2_TP2: tuple[int, dict[str, Any]] = (4, {"tp_size": 2, "sequence_parallel": True})
PP2_TP2: tuple[int, dict[str, Any]] = (4, {"tp_size": 2, "pp_size": 2})
EP2_TP2: tuple[int, dict[str, Any]] = (2, {"tp_size": 2, "ep_size": 2})

# Architecture, packed, where the run begins and where it goes on.
JOURNEYS: dict[str, tuple[str, bool, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "tp2-fsdp2": ("qwen3", True, TP2, FSDP2),
    "pp2-tp2": ("qwen3", True, PP2, TP2),
    "gpt2-tp2-pp2": ("gpt2", False, TP2, PP2),
    "phi3-one-tp2": ("phi3", False, ONE, TP2),
    "ep2-one": ("qwen3_moe", True, EP2, ONE),
    "ep2xtp2-pp2": ("qwen3_moe", True, EP2_TP2, PP2),
    "fsdp2xtp2-pp2": ("qwen3", True, FSDP2_TP2, PP2),
    "cp2-ddp": ("llama", False, CP2, DDP2),
    "pp2xtp2-cp2": ("qwen3", True, PP2_TP2, CP2),
}


@pytest.fixture(scope="module")
def straight(bench: Bench) -> dict[tuple[str, bool, str], Path]:
    """Run folders of uninterrupted runs in one process."""
    return {}


def recipe_of(bench: Bench, architecture: str, packing: bool, optimizer: str) -> dict[str, Any]:
    momentum: dict[str, Any] = {"name": "sgd", "momentum": 0.9} if optimizer == "sgd" else {"eps": 1e-5}
    return bench.recipe(
        bench.model(architecture),
        data={"packing": packing},
        training={"max_steps": STEPS, "max_grad_norm": 0.5},
        optimizer=momentum,
    )


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_run_goes_on_with_other_axes(bench: Bench, straight: dict[tuple[str, bool, str], Path], name: str) -> None:
    """Losses, gradient norms, weights and moments of the run that was not stopped, and no row twice."""
    architecture, packing, begin, end = JOURNEYS[name]
    optimizer = ("adamw", "sgd")[list(JOURNEYS).index(name) % 2]
    key = (architecture, packing, optimizer)
    if key not in straight:
        straight[key] = travel(bench, recipe_of(bench, *key), [(*ONE, None)])
    found = travel(bench, recipe_of(bench, *key), [(*begin, STOP), (*end, None)])
    for row, reference in zip(lines(found), lines(straight[key]), strict=True):
        assert (row["step"], row["tokens"]) == (reference["step"], reference["tokens"])
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
    state, whole = (tensors(checkpoint(run, STEPS)) for run in (found, straight[key]))
    assert state.keys() == whole.keys()
    for path, tensor in whole.items():
        error = (state[path] - tensor).norm() / tensor.norm().clamp_min(1e-12)
        assert state[path].shape == tensor.shape and error <= 1e-4, f"{path}: {error}"


def test_what_is_stored_of_a_cut_model_is_the_whole_tensor_bit_for_bit(bench: Bench) -> None:
    """A checkpoint at a learning rate of zero holds the weights of the model's own file, whatever cut them; its names and
    shapes are those of one process."""
    recipes = {}
    for name, (world_size, distributed) in {"one": ONE, "tp2": TP2, "pp2xtp2": PP2_TP2}.items():
        training = {"max_steps": 1, "learning_rate": 0.0}
        scheduler = {"name": "constant", "warmup_steps": 0}
        recipes[name] = bench.recipe(bench.model("gpt2"), training=training, lr_scheduler=scheduler)
        assert bench.train({**recipes[name], "distributed": distributed}, world_size).error is None
    one, *others = (tensors(checkpoint(Path(r["checkpoint"]["dir"]), 1)) for r in recipes.values())
    for other in others:
        assert {n: t.shape for n, t in other.items()} == {n: t.shape for n, t in one.items()}
        weights = [name for name in one if "exp_avg" not in name]
        assert weights and all(torch.equal(other[name], one[name]) for name in weights)
