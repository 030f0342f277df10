"""An adapter in PEFT's own files: `adapter_config.json` and `adapter_model.safetensors`.

Tensors have other names there than in the model: PEFT's adapter name is taken out, a prefix is put in front, and what is trained
whole stands under the name that it has in the bare model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.layout.pieces import aliases, named_pieces, piece_of, whole_shape
from meshtune.models import hub
from meshtune.models.adapters.view import Adapter
from meshtune.models.headers import safetensors_header
from meshtune.models.placing import local_of, own_slice

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""What PEFT calls the adapter in the names of the model's tensors."""

_PREFIX = "base_model.model."
_OF_THE_BASE = ".base_layer.weight"
_SAVED = f".modules_to_save.{NAME}."
_MAGNITUDE = ".lora_magnitude_vector"
"""PEFT leaves the `.weight` of this one out, and transformers does not find it then; both find it with."""

# Of PEFT's config: what says nothing of the adapter's form, and what meshtune gives the same meaning as PEFT.
_ABOUT = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"} | {
    "task_type",
    "runtime_config",
    "init_lora_weights",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
}
_KNOWN = {"r", "lora_alpha", "target_modules", "exclude_modules", "target_parameters", "modules_to_save"} | {
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "trainable_token_indices",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that put a rest in the place of the base's weights, which the adapter then belongs to."""


def file_name(name: str) -> str:
    """What the tensor called `name` in a model with an adapter is called in its file."""
    if _SAVED in name:
        return _PREFIX + name.replace(_SAVED, ".", 1)
    if name.endswith(f".{NAME}"):
        return _PREFIX + name.removesuffix(f".{NAME}")
    module, _, last = name.rpartition(".")
    return f"{_PREFIX}{module.removesuffix(f'.{NAME}')}.{last}"


def find(name: str) -> Path:
    """The folder of an adapter on this machine: `name` itself, or what the hub has under that id, fetched.

    Raises ModelError if there is none, or its weights are pickles.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _fetched(name)
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if WEIGHTS in missing and (folder / "adapter_model.bin").is_file():
        raise ModelError(
            f"peft.adapter: the weights of {folder} are a pickle (adapter_model.bin), which is not read, since loading one can "
            "run anything; save the adapter as safetensors: PeftModel.save_pretrained does"
        )
    if missing:
        raise ModelError(
            f"peft.adapter: {folder} has no {' and no '.join(missing)}; an adapter's folder, as PEFT and `meshtune export` write "
            "it, holds both"
        )
    return folder


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, allow_patterns=["adapter_config.json", "adapter_model.*"], local_files_only=hub.local_files_only(name)
        )
    except Exception as error:
        raise ModelError(f"peft.adapter: there is no adapter {name}: {hub.reason(name, error)}") from error
    return Path(found)


def read_config(folder: Path) -> LoraConfig:
    """PEFT's config of the adapter in `folder`.

    Raises ModelError for another kind of adapter than LoRA, and for what it says that would not be done here.
    """
    from peft import LoraConfig

    file = folder / CONFIG
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind = values.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"peft.adapter: {file} cannot be read: {error}") from error
    if kind != "LORA":
        raise ModelError(f"peft.adapter: {file} is of an adapter of peft_type {kind}; wanted LORA")
    wrong = [f"{key}: {value!r}" for key, value in values.items() if not _is_understood(key, value)]
    if wrong:
        raise ModelError(f"peft.adapter: {file} asks for what is not done here: {', '.join(wrong)}")
    begun = str(values.get("init_lora_weights")).lower()
    if begun.startswith(_CHANGES_BASE):
        raise ModelError(
            f"peft.adapter: {file} says init_lora_weights: {begun}; such an adapter belongs to what that initialisation left of "
            "the base, not to the base. Convert it: PeftModel.save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for key, kinds in (("r", int), ("lora_alpha", (int, float))):
        if key in values and (not isinstance(values[key], kinds) or values[key] <= 0):
            raise ModelError(f"peft.adapter: {file} says {key}: {values[key]!r}; wanted a number above 0")
    values["inference_mode"] = False  # or PEFT freezes it
    try:
        return LoraConfig(**{key: value for key, value in values.items() if key in _KNOWN | _ABOUT})
    except (TypeError, ValueError) as error:
        raise ModelError(f"peft.adapter: {file}: {error}") from error


def _is_understood(key: str, value: Any) -> bool:
    """Another key of PEFT's, of this version or of a later one, is harmless where it says nothing."""
    return key in _KNOWN | _ABOUT or value in (None, False, "none", {}, [])


def write_config(folder: Path, config: LoraConfig, base: str, revision: str | None = None) -> None:
    """`adapter_config.json` of an adapter of the model `base` (a hub id, or a folder), whose weights it left as they were."""
    written = copy.deepcopy(config)
    written.base_model_name_or_path, written.revision = base, revision
    written.inference_mode, written.task_type = True, "CAUSAL_LM"
    written.init_lora_weights = True
    for key in ("target_modules", "exclude_modules"):
        if isinstance(names := getattr(written, key), set):  # in an order of their own in every process
            setattr(written, key, sorted(names))
    written.save_pretrained(str(folder))


def fill(model: nn.Module, adapter: Adapter, folder: Path) -> None:
    """Give the adapter in a (sharded) `model`, whose own weights are loaded, its values from `folder`. Every rank reads.

    Raises ModelError naming what is missing, what is there and would be ignored, and what has another shape: an adapter that
    loads by half, or not at all, looks as if it had been loaded.
    """
    others, pieces = aliases(model), named_pieces(model)
    parameters = {name: p for name, p in model.named_parameters() if name in adapter.trained}
    wanted = {name: others.get(name, name) for name in parameters}
    tensors = read(folder, wanted.values(), adapter.trained, lambda file: _of_today(model, adapter.config, file))
    shapes = {wanted[name]: whole_shape(p.shape, pieces.get(name)) for name, p in parameters.items()}
    check_shapes(tensors, shapes, folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            local_of(parameter).copy_(own_slice(tensors[wanted[name]], parameter, pieces.get(name)))
    layers = dict(model.named_modules(remove_duplicate=False))
    check_base({inner: layers[inner] for inner in adapter.inner.values() if inner in layers}, folder)


def read_whole(model: nn.Module, adapter: Adapter, folder: Path) -> dict[str, Tensor]:
    """The tensors of the adapter in `folder` by the names of a whole `model`, which may be on meta. Raises as `fill` does."""
    tensors = read(folder, adapter.tensors, convert=lambda file: _of_today(model, adapter.config, file))
    check_shapes(tensors, {name: tuple(p.shape) for name, p in model.named_parameters() if name in tensors}, folder)
    return tensors


def read(
    folder: Path,
    names: Collection[str],
    known: Collection[str] | None = None,
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Whole tensors of the adapter in `folder`, by the `names` that its model gives them, in their dtype there. `known` are those
    of the adapter's tensors that may also be in the file; `convert` makes today's form of a file that has another.

    Raises ModelError naming what is missing, and what is there and would be ignored.
    """
    file = folder / WEIGHTS
    safetensors_header(file, "peft.adapter")
    stored = {f"{name}.weight" if name.endswith(_MAGNITUDE) else name: t for name, t in load_file(file).items()}
    wanted = {file_name(name): name for name in names}
    expected = wanted.keys() | set(map(file_name, known or ()))
    if convert is not None and not stored.keys() <= expected:
        stored = convert(stored)
    missing = [name for name in wanted if name not in stored]
    foreign = [name for name in stored if name not in expected and not _is_base_of(name, expected)]
    if missing or foreign:
        raise ModelError(_mismatch(file, missing, foreign))
    return {wanted[name]: tensor for name, tensor in stored.items() if name in wanted}


def _of_today(model: nn.Module, config: LoraConfig, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What PEFT makes of an adapter whose experts had a layer each, as older versions of transformers had them."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    try:
        converted: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(model, config, stored)
    except Exception:  # of a file of another model: its names say so better
        return stored
    return converted


def _mismatch(file: Path, missing: list[str], foreign: list[str]) -> str:
    told = [f"  {name} is missing" for name in missing] + [f"  {name} is not of this adapter" for name in foreign]
    shown = [*told[:20], f"  and {len(told) - 20} more"] if len(told) > 20 else told
    hint = ""
    if foreign and not any(name.startswith(_PREFIX) for name in foreign):
        hint = f"\nnames of PEFT's files begin with {_PREFIX}"
    return f"peft.adapter: {file} does not fit its own config and this model:\n" + "\n".join(shown) + hint


def check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raises ModelError naming each of `tensors` whose shape is not that of the model."""
    wrong = [
        f"  {file_name(name)} has shape {tuple(tensor.shape)}, in this model {shapes[name]}"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != shapes[name]
    ]
    if wrong:
        raise ModelError(f"peft.adapter: {folder / WEIGHTS} is of another model:\n" + "\n".join(wrong[:20]))


def _is_base_of(name: str, expected: Collection[str]) -> bool:
    """Whether `name` is the weight that stands in a layer with an adapter."""
    return name.endswith(_OF_THE_BASE) and any(
        one.startswith(name.removesuffix(_OF_THE_BASE) + ".") for one in expected
    )


def check_base(layers: Mapping[str, nn.Module], folder: Path) -> None:
    """PEFT writes an embedding that has an adapter whole beside it: it must be the one that the model has. `layers` are (sharded)
    ones by the paths at which they stand in the model with the adapter."""
    for name, tensor in load_file(folder / WEIGHTS).items():
        layer = layers.get(name.removeprefix(_PREFIX).removesuffix(".weight"))
        if not name.endswith(_OF_THE_BASE) or layer is None:
            continue
        own, piece = layer.get_parameter("weight").detach(), piece_of(layer, "weight")
        if own.is_meta:  # it is on another stage of a pipeline
            continue
        same = whole_shape(own.shape, piece) == tuple(tensor.shape)
        if not same or not torch.equal(own_slice(tensor, own, piece).to(own.dtype), local_of(own).cpu()):
            raise ModelError(
                f"peft.adapter: {folder / WEIGHTS} holds {name}, which is not the one that the model has: the base was changed, "
                "too, and is needed as it was; merge the adapter into it, and train from there"
            )
