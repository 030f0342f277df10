"""Write a (sharded) model as a Hugging Face folder: original names and dtypes, config, generation config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from meshtune.errors import ModelError
from meshtune.models.hf import unit_names
from meshtune.models.source import Source, safetensors_header, tensor_dtypes

_MAX_SHARD_BYTES = 5 * 1000**3


def export(
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `folder` so that transformers, PEFT and vLLM load it. Every rank must call it; rank 0 writes.

    `dtype` None keeps each tensor's dtype of the checkpoint it came from; a named one is given to every floating tensor.
    The folder appears only when it is complete, in place of what stood there. The live model is not changed.
    """
    writer = _is_writer()
    beside = folder.with_name(f".{folder.name}.incomplete")
    if writer:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    shards = _Shards(beside)
    dtypes = tensor_dtypes(source) if dtype is None and source.section.dtype == "auto" else {}
    default = dtype or source.export_dtype
    for state in _whole_tensors(model, writer, set(dtypes)):
        if writer:
            for name, tensor in revert_weight_conversion(model, state).items():
                shards.add(name, _cast(tensor, dtypes.get(name, default)))
    if writer:
        shards.close()
        _write_config(model, source, beside, default)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        _check(beside)
        _replace(beside, folder)
    if dist.is_initialized():
        dist.barrier()


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _whole_tensors(model: PreTrainedModel, writer: bool, stored: set[str]) -> Iterator[dict[str, Tensor]]:
    """State dict of one block at a time, gathered; empty on ranks that do not write.

    A tied copy is left out unless the checkpoint that the model came from stored it (`stored`).
    """
    state = model.state_dict()
    for name in list(state):
        if name in model.all_tied_weights_keys and name not in stored:
            del state[name]
    units = unit_names(model)
    blocks: dict[str, list[str]] = {}
    for name in state:
        blocks.setdefault(next((unit for unit in units if name.startswith(f"{unit}.")), ""), []).append(name)
    for names in blocks.values():
        block = {}
        for name in names:
            tensor = state[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writer:
                block[name] = whole.cpu()
        yield block


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that shares no memory with another tensor of the file; integers and booleans keep their dtype."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(wanted, copy=True).contiguous()


class _Shards:
    """Tensors collected into files of at most 5 GB, named once their number is known."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.bytes = self.pending_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > _MAX_SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor
        self.pending_bytes += size
        self.bytes += size

    def close(self) -> None:
        self._flush()
        count = len(self.files)
        weight_map = {}
        for index, names in enumerate(self.files):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{index}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index_json = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            _write_json(self.folder / "model.safetensors.index.json", index_json)

    def _flush(self) -> None:
        save_file(self.pending, self.folder / f"part-{len(self.files)}", metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0


def _write_config(model: PreTrainedModel, source: Source, folder: Path, dtype: torch.dtype) -> None:
    """The checkpoint's own config.json where there is one, so that older readers still know it; only its dtype may change."""
    original = _original(source, "config.json")
    if original is None or source.gguf_file:
        config = type(source.config).from_dict(source.config.to_dict())
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)
    else:
        values = json.loads(original.read_text(encoding="utf-8"))
        values.setdefault("architectures", [type(model).__name__])
        key = "torch_dtype" if "torch_dtype" in values else "dtype"
        values[key] = str(dtype).removeprefix("torch.")
        _write_json(folder / "config.json", values)
        if source.section.trust_remote_code:
            for code in original.parent.glob("*.py"):
                shutil.copy2(code, folder / code.name)
    generation = _original(source, "generation_config.json")
    if generation is not None:
        shutil.copyfile(generation, folder / "generation_config.json")
    elif model.can_generate():
        GenerationConfig.from_model_config(source.config).save_pretrained(folder)


def _original(source: Source, name: str) -> Path | None:
    found = cached_file(
        source.location,
        name,
        revision=source.section.revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check(folder: Path) -> None:
    """A full disk may cut a file without an error: read back every header."""
    for file in folder.glob("*.safetensors"):
        try:
            safetensors_header(file)
        except ModelError as error:
            raise OSError(f"the export in {folder} is damaged: {error}") from error


def _replace(beside: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(folder)
