"""Checkpoints whose weights bitsandbytes has quantised already, as transformers writes them.

Beside `P.weight`, which is packed [out * in / 2, 1] or int8 [out, in], stand `P.weight.absmax`, `P.weight.quant_map`,
`P.weight.nested_absmax`, `P.weight.nested_quant_map` and `P.weight.quant_state.bitsandbytes__nf4`, or `P.SCB` and
`P.weight_format`. Such weights are taken as they are, by a recipe that asks for the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from meshtune.errors import ModelError
from meshtune.models.quantization.section import QuantizationSection

if TYPE_CHECKING:
    from torch import Tensor

    from meshtune.models.quantization.linear import QuantizedLinear

_BESIDE = (
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    ".weight.quant_state.bitsandbytes__nf4",
    ".weight.quant_state.bitsandbytes__fp4",
    ".SCB",
    ".weight_format",
)
_FOUR_BIT, _EIGHT_BIT = ".weight.absmax", ".SCB"


def beside_weights(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of each quantised weight among the `names` of a checkpoint, what belongs to it: `P.weight` -> {`absmax`: its name, ...}."""
    every = set(names)
    layers = [name.removesuffix(end) for end in (_FOUR_BIT, _EIGHT_BIT) for name in every if name.endswith(end)]
    return {
        f"{layer}.weight": {
            end.removeprefix(".weight").removeprefix("."): f"{layer}{end}"
            for end in _BESIDE
            if f"{layer}{end}" in every
        }
        for layer in layers
        if f"{layer}.weight" in every
    }


def check_form(name: str, config: Mapping[str, Any], section: QuantizationSection | None) -> None:
    """Raises ModelError unless a checkpoint with this `quantization_config` can be taken by a recipe with this section."""
    method = config.get("quant_method")
    form = _form(config)
    if form is None:
        raise ModelError(
            f"model.name: {name} is quantised ({method}), and no such weights are read; name the unquantised checkpoint, whose "
            "weights `quantization:` holds in few bits as they are loaded"
        )
    wanted = f"quantization: {{{', '.join(f'{key}: {_word(value)}' for key, value in form.items())}}}"
    if section is None:
        raise ModelError(
            f"model.name: {name} is quantised (bitsandbytes, {form['type']}), and such weights cannot be trained; write "
            f"`{wanted}` and `peft:` to train an adapter beside them, or name the unquantised checkpoint"
        )
    asked = {"type": section.type, **({"double_quant": section.doubled} if section.type in ("nf4", "fp4") else {})}
    if section.library != "bitsandbytes" or asked != form:
        raise ModelError(f"quantization: {name} is quantised in another form; write `{wanted}`")


def held_of(layer: QuantizedLinear, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a `layer` at `path` is to hold, of a checkpoint's `tensors`: `weight` and what stands beside it.

    Raises ModelError if they are of another form or shape than the layer is.
    """
    import torch

    from meshtune.models.quantization.bnb import FourBit
    from meshtune.models.quantization.linear import bits

    shape = (layer.out_features, layer.in_features)
    codec, weight = layer.codec, tensors["weight"].view(torch.int8 if "SCB" in tensors else torch.uint8)
    if not isinstance(codec, FourBit):
        if weight.shape != shape:
            raise ModelError(
                f"{path}.weight has shape {tuple(weight.shape)} in the checkpoint and {shape} in the model"
            )
        if (order := int(tensors.get("weight_format", torch.zeros(())))) != 0:
            raise ModelError(
                f"{path}.weight_format is {order} in the checkpoint: an order of a bitsandbytes that is no more"
            )
        return {"weight": weight, "SCB": bits(tensors["SCB"])}
    import bitsandbytes.functional

    beside = {key: tensor for key, tensor in tensors.items() if key != "weight"}
    state: Any = bitsandbytes.functional.QuantState.from_dict(beside, weight.device)
    found = (state.quant_type, state.blocksize, state.nested, tuple(state.shape))
    if found != (codec.kind, codec.block, codec.double, shape):
        raise ModelError(
            f"{path}.weight is quantised as (type, block_size, double_quant, shape) {found} in the checkpoint, and recipe and "
            f"model make it {(codec.kind, codec.block, codec.double, shape)}"
        )
    return codec.of_state(weight, state)


def _form(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `quantization:` has to say for such a checkpoint; None if it is not bitsandbytes' or keeps floats."""
    if config.get("quant_method") not in (None, "bitsandbytes"):
        return None
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return {
            "type": config.get("bnb_4bit_quant_type", "fp4"),
            "double_quant": bool(config.get("bnb_4bit_use_double_quant", False)),
        }
    if (config.get("load_in_8bit") or config.get("_load_in_8bit")) and not config.get("llm_int8_has_fp16_weight"):
        return {"type": "int8"}
    return None


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
