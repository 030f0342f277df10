"""Write a (sharded) model as a Hugging Face folder: original names and dtypes, config, generation config, tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ContextManagers, cached_file

from meshtune.errors import ModelError
from meshtune.models import hub
from meshtune.models.adapters.merging import MERGED, Merging
from meshtune.models.gathering import whole_tensors
from meshtune.models.headers import safetensors_header, stored_dtypes
from meshtune.models.naming import CheckpointNames
from meshtune.models.quantization.loading import dequantised_state
from meshtune.models.shards import Shards, write_json
from meshtune.models.source import Source
from meshtune.models.writing import OnWriter, empty_beside, replace

_MAX_SHARD_BYTES = 5 * 1000**3


def export(
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    merging: Merging | None = None,
) -> None:
    """Write `folder` so that transformers, PEFT and vLLM load it. Every rank must call it; rank 0 writes.

    Tensors have the names of the checkpoint that the model came from. `dtype` None keeps each tensor's dtype of it; a named
    one is given to every floating tensor. What the checkpoint holds beside the model (a vision tower, layers that predict
    further tokens) is written as it was. Quantised weights are written as the numbers that they stand for. `merging` changes
    tensors on their way, a block at a time, and those of `model` are let go, so that it is never there twice; a head that gets
    other values than the embedding that it is tied to is untied, and the config says so.

    The folder appears only when it is complete, in place of what stood there. Without `merging` the live model is not changed.
    Raises OSError on every rank if rank 0 cannot write.
    """
    stored = stored_dtypes(source.files)
    names = CheckpointNames(_whole_on_meta(model), stored)
    chosen = dtype or (None if source.section.dtype == "auto" else source.export_dtype)
    untied = set() if merging is None else merging.untied(model)
    _check_unties(model, untied)

    def add(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            shards.add(name, _cast(tensor, chosen or stored.get(name) or source.export_dtype))

    def add_state(state: dict[str, Tensor]) -> None:
        changed = dequantised_state(model, state)
        if merging is not None:
            changed = merging(changed, chosen or source.export_dtype)
        add(names.written(changed).items())

    with OnWriter(folder) as writer:
        shards = writer.do(lambda: Shards(empty_beside(folder), max_shard_bytes))
        for state in whole_tensors(model, names.left_out() - untied):
            writer.do(partial(add_state, state))
            if merging is not None:
                _let_go(model, state)
        writer.do(lambda: add(_unread_tensors(source, names)))
        if merging is not None:
            writer.do(lambda: write_json(shards.folder / MERGED, merging.record()))
        writer.do(lambda: _finish(shards, model, source, tokenizer, chosen, folder, bool(untied)))


def _let_go(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Free the memory of what has been taken of a model in this process."""
    state = model.state_dict()
    for name in names:
        storage = state[name].untyped_storage()
        if storage.resizable():  # and not a file's own pages
            storage.resize_(0)


def _check_unties(model: PreTrainedModel, names: set[str]) -> None:
    """Raises ModelError if a reader of the export would tie again what `names` holds untied."""
    tied = _whole_on_meta(model, tie_word_embeddings=False).all_tied_weights_keys if names else {}
    if left := sorted(names & {*tied.keys(), *tied.values()}):
        raise ModelError(
            f"{type(model).__name__} ties {' and '.join(left)} whatever its config says, and an adapter changes one alone: "
            "export the adapter without --merge, or train it with none on these"
        )


def _whole_on_meta(model: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    """The model whose parts the ranks hold, by names and shapes; with `changes` of its config."""
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
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


def _finish(
    shards: Shards,
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    folder: Path,
    untied: bool,
) -> None:
    shards.close()
    _write_config(model, source, shards.folder, dtype, untied)
    _write_generation_config(model, source, shards.folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(shards.folder)
    for file in shards.folder.glob("*.safetensors"):
        safetensors_header(file)  # a full disk may cut a file without an error
    replace(shards.folder, folder)


def _write_config(
    model: PreTrainedModel, source: Source, folder: Path, dtype: torch.dtype | None, untied: bool
) -> None:
    """The checkpoint's own config.json where there is one, so that older readers still know it; a named dtype changes it, and
    so does a head that is tied no more."""
    original = None if source.gguf_file else _original(source, "config.json")
    values = json.loads(original.read_text(encoding="utf-8")) if original else {}
    if original is None or not (source.files or values.get("model_type") == source.config.model_type):
        config = type(source.config).from_dict(source.config.to_dict())
        config.architectures = [type(model).__name__]
        config.dtype = dtype or source.export_dtype
        config.tie_word_embeddings = config.tie_word_embeddings and not untied
        config.save_pretrained(folder)
        return
    values.setdefault("architectures", [type(model).__name__])
    values.pop("quantization_config", None)  # what it says is quantised is written as numbers
    values = values if dtype is None else _with_dtype(values, dtype)
    write_json(folder / "config.json", _untied(values) if untied else values)
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


def _untied(values: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose head has weights of its own; so its text part, where it has one."""
    parts = {name: _untied(part) for name, part in values.items() if name == "text_config" and isinstance(part, dict)}
    return {**values, **parts, "tie_word_embeddings": False}


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
