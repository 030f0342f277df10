"""Which attention runs: what the recipe asks for, if it is proved exact on a twin of the user's model before training.

What is proved, and cannot be read from any config: no position sees a later one; the head, run on chosen positions, gives
the model's own logits; a batch as the loader makes it (padded, or packed) gives every document the hidden states and the
gradient that it has alone, also when it is cut over context-parallel ranks. A list of model names would be wrong next week.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from meshtune.errors import ModelError
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.cutting import cannot_be_cut
from meshtune.models.source import Source
from meshtune.models.trial import Trial


@dataclass(frozen=True)
class Attention:
    """The implementation that transformers is given, and its name for people; `whole` are the classes of layers that are given
    whole sequences where these are cut over ranks."""

    implementation: str
    description: str
    whole: tuple[str, ...] = ()


def choose_attention(
    source: Source,
    packing: bool,
    device: torch.device,
    compute_dtype: torch.dtype,
    cache: Path | None = None,
    *,
    longest_row: int = 0,
    preferred: str | None = None,
    context: tuple[int, str] | None = None,
    longest_document: int | None = None,
) -> Attention:
    """What `model.attention` asks for, or for `auto` the first that runs exactly here.

    `longest_row` is the most tokens that a packed micro-batch may have; `preferred` is what `auto` chose when the run began;
    `context` is the number of ranks over which sequences are cut, if more than one, and the method of attention over them;
    `longest_document` is the most tokens that a document may have, if fewer than a row.
    Raises ModelError with the reasons if none does: before any weight is read.
    """
    if context is not None and context[0] > 1:
        if problem := cannot_be_cut(source, longest_document or longest_row, *context):
            name = source.model_class.__name__
            raise ModelError(f"distributed.cp_size: {context[0]} cannot run {name}: {problem}")
        return _attention_over_ranks(source, packing, device, cache, longest_row, context)
    passes_positions = packing and longest_row > (source.max_positions or longest_row)
    trial = Trial(source, packing, device, passes_positions)
    reasons = []
    candidates = _candidates(source, packing, device, compute_dtype)
    for candidate in sorted(candidates, key=lambda name: name != preferred):
        dtype = compute_dtype if candidate.startswith("flash") else torch.float32
        record = _record(source, candidate, [packing, passes_positions], device, dtype, cache)
        reason = None if record is not None and record.exists() else trial(candidate, dtype)
        if reason is None:
            _keep(record)
            return Attention(candidate, _describe(candidate))
        reasons.append(f"{_describe(candidate)}: {reason}")
    wanted = "write `data.packing: false`" if packing else "name another `model.attention`"
    raise ModelError(
        f"model.attention: {source.section.attention} cannot run {source.model_class.__name__}"
        f"{' packed' if packing else ''}; {wanted}\n  " + "\n  ".join(reasons)
    )


def _attention_over_ranks(
    source: Source, packing: bool, device: torch.device, cache: Path | None, longest_row: int, context: tuple[int, str]
) -> Attention:
    size, method = context
    passes_positions = packing and longest_row > (source.max_positions or longest_row)
    facts = [packing, passes_positions, method]
    record = _record(source, DOCUMENT_ATTENTION, facts, device, torch.float32, cache)
    if record is None or not record.exists():
        trial = Trial(source, packing, device, passes_positions)
        whole: tuple[str, ...] = ()
        reason = trial(DOCUMENT_ATTENTION, torch.float32)
        if reason is None:
            reason, whole = trial.cut(method)
        if reason is not None:
            raise ModelError(
                f"distributed.cp_size: {size} cannot run {source.model_class.__name__}, whose tokens must meet in causal "
                f"attention or in layers that need no mask; write `cp_size: 1`\n  {_describe(DOCUMENT_ATTENTION)}: {reason}"
            )
        _keep(record, " ".join(whole))
    else:
        whole = tuple(record.read_text(encoding="utf-8").split())
    description = f"{_describe(DOCUMENT_ATTENTION)}, over {size} ranks by {method}"
    if whole:
        description += f"; whole sequences in {', '.join(whole)}"
    return Attention(DOCUMENT_ATTENTION, description, whole)


def _candidates(source: Source, packing: bool, device: torch.device, compute_dtype: torch.dtype) -> list[str]:
    asked = source.section.attention
    if asked == "sdpa":
        return [DOCUMENT_ATTENTION, "sdpa"] if packing else ["sdpa"]
    if asked != "auto":
        return [asked]
    flash = ["flash_attention_2"] if packing and _flash_runs(device, compute_dtype) else []
    return [*flash, *([DOCUMENT_ATTENTION] if packing else []), "sdpa", "eager"]


def _flash_runs(device: torch.device, compute_dtype: torch.dtype) -> bool:
    return device.type == "cuda" and compute_dtype in (torch.bfloat16, torch.float16) and is_flash_attn_2_available()


def _describe(implementation: str) -> str:
    return "sdpa, one call per document" if implementation == DOCUMENT_ATTENTION else implementation


def _record(
    source: Source, attention: str, batch: list[Any], device: torch.device, dtype: torch.dtype, cache: Path | None
) -> Path | None:
    """The file whose presence says that this was proved. It is named by all that the proof depends on; code of the hub's is
    proved anew every time."""
    if cache is None or source.model_class.is_custom_code():
        return None
    versions = [version(package) for package in ("torch", "transformers")]
    facts: list[Any] = [
        source.config.to_json_string(use_diff=False),
        source.model_class.__qualname__,
        source.section.attention,
    ]
    facts += [attention, batch, device.type, str(dtype), versions, _own_code()]
    return cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _own_code() -> str:
    """Hash of this room, of the batch and of the ranks: a proof by other code proves nothing."""
    package = Path(__file__).parent.parent
    files = [file for room in ("models", "data", "layout") for file in sorted((package / room).glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _keep(record: Path | None, found: str = "") -> None:
    """Refusals are not kept: what is missing may have been installed by the next run."""
    if record is None or record.exists():
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    beside = record.with_name(f"{record.name}.{os.getpid()}.tmp")
    beside.write_text(found, encoding="utf-8")
    os.replace(beside, record)
