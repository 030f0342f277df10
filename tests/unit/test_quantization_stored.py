"""Checkpoints that transformers has written with bitsandbytes' weights are taken as they are, or refused with what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from meshtune.errors import ModelError
from meshtune.models import hf
from meshtune.models.export import export
from meshtune.models.fitting import quantised_in_checkpoint
from meshtune.models.headers import stored_dtypes
from meshtune.models.quantization.choosing import choose, quantise
from meshtune.models.quantization.loading import quantised_layers
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from tests.unit.models_tiny import save_tiny

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
INT8 = {"load_in_8bit": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nf4": (NF4, {}, "{type: nf4, double_quant: true}"),
    "fp4": (FP4, {"type": "fp4", "double_quant": False}, "{type: fp4, double_quant: false}"),
    "int8": (INT8, {"type": "int8"}, "{type: int8}"),
}


def quantised_folder(folder: Path, **settings: Any) -> tuple[Path, Any]:
    """A folder of quantised weights, all linear layers but the head and values, and the model of transformers."""
    plain = save_tiny("llama", folder / "plain", **SMALL)
    config = BitsAndBytesConfig(llm_int8_skip_modules=["lm_head", "v_proj"], **settings)
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "quantised")
    return folder / "quantised", model


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_are_taken_as_they_are(form: str, tmp_path: Path) -> None:
    settings, section_values, said = FORMS[form]
    folder, theirs = quantised_folder(tmp_path, **settings)
    asked, section = ModelSection(name=str(folder)), QuantizationSection(**section_values)
    source = resolve(asked, section)
    assert source.dtype == torch.bfloat16
    assert stored_dtypes(source.files).keys() == {name for name, _ in theirs.named_parameters()}
    model = hf.build(source, "eager")
    layers = quantised_in_checkpoint(source, model)
    assert len(layers) == 12
    quantise(model, choose(model, section, only=layers))
    hf.load(model, source, CPU)
    for path, layer in quantised_layers(model).items():
        module = theirs.get_submodule(path)
        assert torch.equal(layer.weight.reshape(-1), module.weight.data.reshape(-1).view(layer.weight.dtype)), path
        x = torch.randn((3, layer.in_features))
        assert torch.equal(layer(x), module.train()(x))
    export(model, source, None, tmp_path / "numbers")
    numbers = AutoModelForCausalLM.from_pretrained(tmp_path / "numbers", dtype=torch.float32)
    assert torch.equal(numbers.model.layers[0].mlp.up_proj.weight, theirs_dense(theirs).bfloat16().float())
    kept = theirs.model.layers[0].self_attn.v_proj.weight
    assert torch.equal(model.get_parameter("model.layers.0.self_attn.v_proj.weight"), kept.float())

    with pytest.raises(ModelError, match=r"cannot be trained; write `quantization: \{type: .*`peft:`") as error:
        resolve(asked)
    assert said in str(error.value)
    other = QuantizationSection(type="nf4" if form == "int8" else "int8")
    with pytest.raises(ModelError, match="another form") as error:
        resolve(asked, other)
    assert said in str(error.value)
    with pytest.raises(ModelError, match=r"q_proj is quantised in the checkpoint .*exclude_modules"):
        choose(hf.build(source, "eager"), section.model_copy(update={"exclude_modules": ["q_proj"]}), only=layers)


def theirs_dense(model: Any) -> Tensor:
    """What one of its weights stands for, by its own product."""
    layer = model.model.layers[0].mlp.up_proj
    found: Tensor = dequantize_module_weight(layer).detach()
    return found.float()


def test_a_checkpoint_of_other_blocks_is_refused(tmp_path: Path) -> None:
    """What the config does not say is seen by the sizes of tensors, or else when the first weight is read."""
    folder, _ = quantised_folder(tmp_path, **NF4)
    section = QuantizationSection(block_size=32)
    source = resolve(ModelSection(name=str(folder)), section)
    model = hf.build(source, "eager")
    with pytest.raises(ModelError, match=r"block_size: .* has a scale for 64 weights .*, not for 32; write 64"):
        quantised_in_checkpoint(source, model, section.block)
    quantise(model, choose(model, section, only=quantised_in_checkpoint(source, model)))
    with pytest.raises(ModelError, match=r"layers.0.*weight is quantised as .*'nf4', 64, True.*make it \('nf4', 32"):
        hf.load(model, source, CPU)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}), encoding="utf-8")
    source = resolve(ModelSection(name=str(folder)), QuantizationSection())
    model = hf.build(source, "eager")
    quantise(model, choose(model, QuantizationSection(), only=quantised_in_checkpoint(source, model)))
    with pytest.raises(ModelError, match=r"\(64, 128\)\) in the checkpoint"):
        hf.load(model, source, CPU)
