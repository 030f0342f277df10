"""Write the adapter of a (sharded) model as a folder that PEFT loads, and vLLM and transformers by it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from meshtune.layout.pieces import aliases
from meshtune.models.adapters import files
from meshtune.models.adapters.view import Adapter
from meshtune.models.gathering import whole_tensors
from meshtune.models.headers import safetensors_header
from meshtune.models.source import Source
from meshtune.models.writing import OnWriter, empty_beside, replace

if TYPE_CHECKING:
    from peft import LoraConfig

_BEGINNING = ".initial"
_SHOWN = 5
_BEGINS_AS_ZEROS = re.compile(r"\.lora_(B|embedding_A)\.[^.]+(\.weight)?$")


def export_adapter(
    model: nn.Module,
    adapter: Adapter,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write `folder` with the adapter that was put into `model`. Every rank must call it; rank 0 writes. Returns, there, the
    layers whose adapter does nothing, since the matrix that begins as zeros is zeros still.

    Tensors have the dtype that they are trained in, or `dtype`. An adapter that began as a part of the weights is written as one
    of the weights as they were: of twice the rank, of which one half takes back the beginning.

    The folder appears only when it is complete, in place of what stood there. Raises OSError on every rank if rank 0 cannot
    write.
    """
    tensors: dict[str, Tensor] = {}
    with OnWriter(folder) as writer:
        tensors = whole_adapter(model, adapter)
        writer.do(lambda: _write(tensors, adapter.config, source, tokenizer, folder, dtype))
    return [
        name.partition(".lora_")[0]
        for name, tensor in tensors.items()
        if _BEGINS_AS_ZEROS.search(name) and not tensor.any()
    ]


def does_nothing(layers: Sequence[str]) -> str:
    """Of the layers that `export_adapter` has named, for people."""
    shown = ", ".join(layers[:_SHOWN]) + (", ..." if len(layers) > _SHOWN else "")
    return f"the adapter of {len(layers)} layers does nothing: it is zero, as it began ({shown})"


def whole_adapter(model: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    """Whole tensors of the adapter in a (sharded) `model`, by the names that they have there. Every rank calls it; rank 0 gets
    them, the others none."""
    found: dict[str, Tensor] = {}
    for state in whole_tensors(model, set(model.state_dict()) - set(own_tensors(model, adapter))):
        found.update(state)
    return found


def in_files(tensors: Mapping[str, Tensor], config: LoraConfig) -> tuple[dict[str, Tensor], LoraConfig]:
    """What `whole_adapter` gave, by the names and with the config of PEFT's files."""
    if any(name.endswith(_BEGINNING) for name in tensors):
        tensors, config = of_the_weights(tensors, config)
    return {files.file_name(name): tensor for name, tensor in tensors.items()}, config


def own_tensors(model: nn.Module, adapter: Adapter) -> list[str]:
    """Names of what this rank has of the adapter and no other name or rank gives: its trained tensors, and how those began
    that began as a part of the weights."""
    others = aliases(model)
    trained = [name for name, _ in model.named_parameters() if name in adapter.trained and name not in others]
    return trained + [name for name, _ in model.named_buffers() if _trained_name(name) in adapter.trained]


def _trained_name(name: str) -> str:
    """Of a beginning, that of the tensor that began so."""
    return f"{name.removesuffix(_BEGINNING)}.weight" if name.endswith(_BEGINNING) else ""


def _write(
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    named, config = in_files(tensors, config)
    named = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in named.items()}
    beside = empty_beside(folder)
    save_file(named, beside / files.WEIGHTS, metadata={"format": "pt"})
    safetensors_header(beside / files.WEIGHTS)  # a full disk may cut a file without an error
    local = Path(source.location).is_dir()
    base = str(Path(source.location).absolute()) if local else source.location
    files.write_config(beside, config, base, None if local else source.section.revision)
    if tokenizer is not None:
        tokenizer.save_pretrained(beside)
    replace(beside, folder)


def of_the_weights(tensors: Mapping[str, Tensor], config: LoraConfig) -> tuple[dict[str, Tensor], LoraConfig]:
    """An adapter of what its beginning left of the weights, as one of the weights themselves:
    W - s B0 A0 + s B A is W + s [B -B0] [A; A0]. That of an embedding, which begins as ever, is filled up with zeros: the config
    has one rank for all."""
    joined = dict(tensors)
    for name in [name for name in tensors if ".lora_embedding_" in name]:
        joined[name] = torch.cat(
            [joined[name], torch.zeros_like(joined[name])], 0 if ".lora_embedding_A." in name else 1
        )
    for name in [name for name in tensors if name.endswith(_BEGINNING)]:
        now, began = joined[_trained_name(name)], joined.pop(name)
        is_first = ".lora_A." in name
        joined[_trained_name(name)] = torch.cat([now, began if is_first else -began], 0 if is_first else 1)
    doubled = copy.deepcopy(config)
    doubled.init_lora_weights = True  # or PEFT takes it out of the weights once more
    share = math.sqrt(2) if config.use_rslora else 2  # so that the scale, alpha / sqrt(r) or alpha / r, stays
    doubled.r, doubled.lora_alpha = 2 * config.r, share * config.lora_alpha  # type: ignore[assignment]
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    doubled.rank_pattern = {pattern: 2 * rank for pattern, rank in ranks.items()}
    doubled.alpha_pattern = {pattern: share * alpha for pattern, alpha in alphas.items()}
    return joined, doubled
