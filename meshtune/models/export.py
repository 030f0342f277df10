"""Write a (sharded) model as a Hugging Face folder: original names and dtypes, config, generation config, tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ContextManagers, cached_file

from meshtune.models import hub
from meshtune.models.gathering import whole_tensors
from meshtune.models.naming import CheckpointNames
from meshtune.models.shards import Shards, write_json
from meshtune.models.source import Source, safetensors_header, stored_dtypes

_MAX_SHARD_BYTES = 5 * 1000**3


def export(
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write `folder` so that transformers, PEFT and vLLM load it. Every rank must call it; rank 0 writes.

    Tensors have the names of the checkpoint that the model came from. `dtype` None keeps each tensor's dtype of it; a named
    one is given to every floating tensor. What the checkpoint holds beside the model (a vision tower, layers that predict
    further tokens) is written as it was.

    The folder appears only when it is complete, in place of what stood there. The live model is not changed. Raises OSError
    on every rank if rank 0 cannot write.
    """
    stored = stored_dtypes(source)
    names = CheckpointNames(_whole_on_meta(model), stored)
    chosen = dtype or (None if source.section.dtype == "auto" else source.export_dtype)

    def add(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            shards.add(name, _cast(tensor, chosen or stored.get(name) or source.export_dtype))

    def add_state(state: dict[str, Tensor]) -> None:
        add(names.written(state).items())

    with _OnWriter(folder) as writer:
        shards = writer.do(lambda: Shards(_empty_beside(folder), max_shard_bytes))
        for state in whole_tensors(model, names.left_out()):
            writer.do(partial(add_state, state))
        writer.do(lambda: add(_unread_tensors(source, names)))
        writer.do(lambda: _finish(shards, model, source, tokenizer, chosen, folder))


class _OnWriter:
    """Work of rank 0. Its failure ends its own work only, for other ranks are waiting for it: then all raise together."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.writes = not dist.is_initialized() or dist.get_rank() == 0
        self.problem: Exception | None = None

    def __enter__(self) -> _OnWriter:
        return self

    def do(self, work: Callable[[], Any]) -> Any:
        if not self.writes or self.problem is not None:
            return None
        try:
            return work()
        except Exception as error:
            self.problem = error
            return None

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            return
        told = [None if self.problem is None else f"{type(self.problem).__name__}: {self.problem}"]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise OSError(f"the model could not be written to {self.folder}: {told[0]}") from self.problem


def _whole_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """The model whose parts the ranks hold, by names and shapes."""
    config = copy.deepcopy(model.config)
    with ContextManagers(type(model).get_init_context(model.dtype, False, False, None)):
        whole = type(model)(config)
    whole.tie_weights()
    return whole


def _unread_tensors(source: Source, names: CheckpointNames) -> Iterator[tuple[str, Tensor]]:
    for file in source.files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(names.unread.intersection(tensors.keys())):
                    yield name, tensors.get_tensor(name)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that shares no memory with another tensor of the file; integers and booleans keep their dtype."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(wanted, copy=True).contiguous()


def _empty_beside(folder: Path) -> Path:
    beside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def _finish(
    shards: Shards,
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    folder: Path,
) -> None:
    shards.close()
    _write_config(model, source, shards.folder, dtype)
    _write_generation_config(model, source, shards.folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(shards.folder)
    for file in shards.folder.glob("*.safetensors"):
        safetensors_header(file)  # a full disk may cut a file without an error
    _replace(shards.folder, folder)


def _write_config(model: PreTrainedModel, source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    """The checkpoint's own config.json where there is one, so that older readers still know it; a named dtype changes it."""
    original = None if source.gguf_file else _original(source, "config.json")
    values = json.loads(original.read_text(encoding="utf-8")) if original else {}
    if original is None or not (source.files or values.get("model_type") == source.config.model_type):
        config = type(source.config).from_dict(source.config.to_dict())
        config.architectures = [type(model).__name__]
        config.dtype = dtype or source.export_dtype
        config.save_pretrained(folder)
        return
    values.setdefault("architectures", [type(model).__name__])
    write_json(folder / "config.json", values if dtype is None else _with_dtype(values, dtype))
    if source.section.trust_remote_code:
        for code in original.parent.glob("*.py"):
            shutil.copy2(code, folder / code.name)


def _with_dtype(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with its dtype, under either of its two names, and that of its parts changed."""
    key = "torch_dtype" if "torch_dtype" in values else "dtype"
    parts = {
        name: _with_dtype(value, dtype)
        for name, value in values.items()
        if name.endswith("_config") and isinstance(value, dict)
    }
    return {**values, **parts, key: str(dtype).removeprefix("torch.")}


def _write_generation_config(model: PreTrainedModel, source: Source, folder: Path) -> None:
    original = _original(source, "generation_config.json")
    if original is not None:
        shutil.copyfile(original, folder / "generation_config.json")
    elif model.can_generate():
        GenerationConfig.from_model_config(source.config).save_pretrained(folder)


def _original(source: Source, name: str) -> Path | None:
    found = cached_file(
        source.location,
        name,
        revision=source.section.revision,
        local_files_only=hub.local_files_only(source.location),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _replace(beside: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(folder)
