"""A checkpoint of an adapter holds what is trained and nothing else; the frozen weights come again from where they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.resume.conftest import Bench
from tests.resume.runs import checkpoint, losses, manifest, tensors
from tests.resume.test_layouts import STEPS, travel

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def test_an_adapter_goes_on_over_other_layouts(bench: Bench) -> None:
    """Two stages, then parts of two tensor-parallel ranks, then experts of two, then one rank: one course, beside bfloat16."""
    model = bench.model("qwen3_moe", "-bf16", dtype=torch.bfloat16)
    changes = {"peft": {"r": 4, "target_parameters": EXPERTS, "rank_pattern": {"q_proj": 2}}}
    journey = [(2, {"pp_size": 2}, 3), (2, {"tp_size": 2}, 5), (2, {"ep_size": 2}, 8), (1, {}, None)]
    found = travel(bench, bench.recipe(model, **changes), journey)
    wanted = travel(bench, bench.recipe(model, **changes), [(1, {}, None)])
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    state, whole = tensors(checkpoint(found, STEPS)), tensors(checkpoint(wanted, STEPS))
    assert state.keys() == whole.keys()
    assert {".lora_A." in name or ".lora_B." in name for name in state} == {True}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, tensor in whole.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_other_frozen_weights_are_refused(bench: Bench, tmp_path: Path) -> None:
    """They are in no checkpoint: an adapter would go on beside weights that it was not trained for."""
    folder = bench.model("qwen3", "-changed")
    recipe = bench.recipe(folder, peft={"r": 2, "target_modules": ["q_proj"]})
    assert bench.train(recipe, stop_after=3).error is None
    run = Path(recipe["checkpoint"]["dir"])
    assert len(manifest(checkpoint(run, 3))["base"]) == 32
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    error = bench.train(recipe).error
    assert error is not None
    assert f"{checkpoint(run, 3)} holds an adapter beside other weights than those of {folder}" in error
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    error = bench.train({**recipe, "peft": {"r": 4, "target_modules": ["q_proj"]}}).error
    assert error is not None
    assert "peft.r was 2, is 4" in error
    assert bench.train({**recipe, "peft": {**recipe["peft"], "dropout": 0.1}}).error is None


@pytest.mark.parametrize(
    ("changes", "journey"),
    [
        (
            {"init_lora_weights": "pissa_niter_4", "use_dora": True},
            [(2, {"tp_size": 2}, 4), (2, {"pp_size": 2}, None)],
        ),
        (
            {"init_lora_weights": "olora", "modules_to_save": ["lm_head"], "trainable_token_indices": [70, 200]},
            [(2, {}, 6), (1, {}, None)],
        ),
    ],
    ids=["pissa", "olora"],
)
def test_what_was_taken_out_of_the_weights_is_taken_out_again(
    bench: Bench, changes: dict[str, Any], journey: list[tuple[int, dict[str, Any], int | None]]
) -> None:
    """An adapter that began as a part of the weights goes on beside the rest of them, whatever the layout: how it began is in
    the checkpoint, so that nothing is decomposed anew."""
    model = bench.model("llama", "-bf16", dtype=torch.bfloat16)
    peft = {"r": 4, "target_modules": ["q_proj", "down_proj"], **changes}
    found = travel(bench, bench.recipe(model, peft=peft), journey)
    wanted = travel(bench, bench.recipe(model, peft=peft), [(1, {}, None)])
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    state, whole = tensors(checkpoint(found, STEPS)), tensors(checkpoint(wanted, STEPS))
    assert state.keys() == whole.keys()
    begun = [name for name in state if name.endswith(".initial")]
    assert len(begun) == 2 * 2 * 2
    for name, tensor in whole.items():
        relative, absolute = (0, 0) if name in begun else (1e-3, 2e-5)
        torch.testing.assert_close(state[name], tensor, rtol=relative, atol=absolute)


def test_an_adapter_that_does_nothing_is_named(bench: Bench) -> None:
    """C77: a layer that no gradient came to, here since there was no learning rate, looks like one that has nothing to learn."""
    changes = {"peft": {"r": 2, "target_modules": ["layers.1.self_attn.q_proj"]}, "checkpoint": {"export": "final"}}
    found = [
        bench.train(
            bench.recipe(bench.model("llama"), **changes, training={"max_steps": 2, "learning_rate": rate})
        ).said
        for rate in (0.0, 0.02)
    ]
    told = "the adapter of 1 layers does nothing: it is zero, as it began (model.layers.1.self_attn.q_proj)"
    assert [told in said for said in found] == [True, False]
