"""Quantisation-aware training: the forward sees what the quantised model will, on any layout, and gradients go through."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtune.errors import LayoutError, RecipeError
from meshtune.models.quantization.qat import base_config
from meshtune.models.quantization.section import QuantizationSection
from tests.parity.conftest import Bench
from tests.parity.reference import Course, Hyperparameters, token_losses, train_plainly
from tests.parity.runs import course, train, train_watched

WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
INT8: dict[str, Any] = {"type": "int8"}
INT4: dict[str, Any] = {"type": "int4", "block_size": 32}
# A sum in another order moves a number by 1e-7, and one in some ten thousands over the border between two integers.
FIRST, LATER = 1e-4, 1e-2


def prepared(folder: Path, section: QuantizationSection, step: str = "prepare") -> PreTrainedModel:
    """The model of a folder as torchao makes it, all linear layers but the head."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = QATConfig(base_config(section), step="prepare") if step == "prepare" else base_config(section)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    return model


def plain(bench: Bench, folder: Path, section: QuantizationSection) -> Course:
    model = prepared(folder, section)
    with patch("tests.parity.reference.AutoModelForCausalLM.from_pretrained", return_value=model):
        return train_plainly(folder, bench.windows(True)[:3], Hyperparameters(), bench.rows("validation"))


@pytest.mark.parametrize(
    ("world_size", "distributed", "kind"),
    [
        (2, {}, INT4),
        (2, {"tp_size": 2}, INT4),
        (2, {"tp_size": 2, "sequence_parallel": True}, INT8),
    ],
    ids=["fsdp2-int4", "tp2-int4", "tp2+sp-int8"],
)
def test_training_sees_the_quantised_model(
    bench: Bench, world_size: int, distributed: dict[str, Any], kind: dict[str, Any]
) -> None:
    """The numbers of torchao's layers in a plain loop; and the export, converted by torchao, is the model that was validated."""
    folder, section = bench.model("qwen3", "wide-qat", **WIDE), QuantizationSection(qat=True, **kind)
    readers = 1 if distributed else world_size
    recipe = bench.recipe(folder, True, distributed=distributed, training={"per_device_batch_size": 12 // readers // 3})
    recipe["quantization"] = {"qat": True, **kind}
    bench.ranks.call(world_size, train, recipe, bench.cache)
    found, wanted = course(recipe), plain(bench, folder, section)
    without = bench.plain("qwen3", True, variant="wide-qat")
    assert found.loss[0] != pytest.approx(without.loss[0], rel=3 * FIRST)
    for name in ("loss", "grad_norm", "validation_loss"):
        first, *later = getattr(found, name)
        assert first == pytest.approx(getattr(wanted, name)[0], rel=FIRST), name
        assert later == pytest.approx(getattr(wanted, name)[1:], rel=LATER), name
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert (found.weights[name] - weight).norm() <= LATER * weight.norm(), name
    export = Path(recipe["checkpoint"]["dir"]) / "export"
    seen, converted = prepared(export, section).eval(), prepared(export, section, "convert").eval()
    with torch.no_grad():
        losses = [
            torch.cat([token_losses(model, [row]) for row in bench.rows("validation")]) for model in (seen, converted)
        ]
    assert torch.equal(*losses)
    assert found.validation_loss[-1] == pytest.approx(losses[0].mean().item(), rel=10 * FIRST)


def look(recipe: dict[str, Any], cache: str) -> tuple[int, dict[str, bool], float]:
    """The most distinct weights in a group as a layer uses them, what is so, and how far gradients are from straight through."""
    seen: dict[str, Any] = {}

    def started(root: Any) -> None:
        layers = {name: layer for name, layer in root.model.named_modules() if hasattr(layer, "weight_fake_quantizer")}
        layer = layers["model.layers.1.mlp.up_proj"]
        used = layer.weight_fake_quantizer(layer.weight)
        x = torch.randn(5, layer.in_features)
        layer(x).square().sum().backward()
        gradient = layer.weight.grad.clone()
        layer.weight.grad = None
        inputs, dense = layer.activation_fake_quantizer(x), used.detach().requires_grad_()
        nn.functional.linear(inputs, dense).square().sum().backward()
        groups = used.detach().unflatten(1, (-1, 32))
        seen["levels"] = max(len(group.unique()) for group in groups.flatten(0, 1))
        seen["so"] = {
            "weights are float and as they were": layer.weight.is_leaf and not torch.equal(layer.weight, used),
            "the head is not": type(root.model.get_output_embeddings()) is nn.Linear,
            "embeddings are not": type(root.model.get_input_embeddings()) is nn.Embedding,
            "all others are": len(layers) == 2 * 7,
        }
        through = gradient != 0
        at_the_end = (groups == groups.amax(-1, keepdim=True)).flatten(1)
        seen["so"]["no gradient only where the range ends"] = bool((through | at_the_end).all())
        seen["off"] = ((gradient - dense.grad)[through].norm() / gradient.norm()).item()

    train_watched(recipe, cache, started)
    return seen["levels"], seen["so"], seen["off"]


def test_weights_are_rounded_in_the_forward_and_gradients_go_straight_through(bench: Bench) -> None:
    recipe = bench.recipe(
        bench.model("qwen3", "wide-qat", **WIDE), training={"max_steps": 1, "per_device_batch_size": 12}
    )
    recipe["quantization"] = {"qat": True, "type": "int4", "block_size": 32}
    (answer,) = bench.ranks.call(1, look, recipe, bench.cache)
    levels, so, off = answer
    assert 2 < levels <= 16 and off < 1e-6
    assert all(so.values()), so


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantization": {"qat": True}}, RecipeError, "quantization.qat: is torchao's, of int4 and int8, not of nf4"),
        ({"quantization": {"qat": True, "type": "int4"}, "peft": {}}, RecipeError, "leave out `peft:`, or `qat`"),
        (
            {"quantization": {"qat": True, "type": "int4", "block_size": 64}, "distributed": {"tp_size": 2}},
            LayoutError,
            "o_proj has 64 columns, which 2 ranks would not cut between groups of 64; write quantization.block_size: 32",
        ),
    ],
    ids=["nf4", "peft", "groups"],
)
def test_what_cannot_be_is_said(bench: Bench, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    recipe = bench.recipe(bench.model("qwen3", "wide-qat", **WIDE), training={"per_device_batch_size": 12})
    with pytest.raises(error, match=message):
        bench.ranks.call(2 if "distributed" in changes else 1, train, {**recipe, **changes}, bench.cache)


class TwoPeers:
    """Rank 0 of two: the other's tensor is `other`."""

    size, rank = 2, 0

    def __init__(self, other: Tensor):
        self.other = other

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        other = torch.stack([-self.other.amin(-1), self.other.amax(-1)], -1)
        return torch.maximum(tensor, other)


@pytest.mark.parametrize("what", ["activation_fake_quantizer", "weight_fake_quantizer"])
def test_ranges_are_those_of_all_ranks(what: str) -> None:
    """A part of the features is rounded as in the whole, bit for bit."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    from meshtune.models.quantization.ranges import OverRanks

    model = nn.Sequential(nn.Linear(16, 8))
    quantize_(model, QATConfig(base_config(QuantizationSection(qat=True, type="int8")), step="prepare"))
    whole: Any = getattr(model[0], what)
    x = torch.randn(8, 16) * torch.arange(1, 17)
    part = OverRanks(whole, TwoPeers(x[:, 8:]))(x[:, :8])  # type: ignore[arg-type]
    assert torch.equal(part, whole(x)[:, :8])
    assert not torch.equal(part, whole(x[:, :8]))
