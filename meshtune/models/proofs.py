"""Properties that no config declares, tried on a twin of the user's model before training.

`attention` chooses the implementation that runs. With packing it is taken only if a packed row gives every document the
hidden states it has alone; and always, trunk and head run apart must give the logits of the model's own forward.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from meshtune.errors import ModelError
from meshtune.models.attention import DOCUMENT_ATTENTION, documents
from meshtune.models.causal_lm import CausalLM
from meshtune.models.source import Source
from meshtune.models.twin import twin

_LENGTHS = (11, 3, 9)
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Attention:
    """The implementation that transformers is given, and its name for people."""

    implementation: str
    description: str


def choose_attention(
    source: Source, packing: bool, device: torch.device, compute_dtype: torch.dtype, cache: Path | None = None
) -> Attention:
    """What `model.attention` asks for, or for `auto` the first that runs exactly here.

    Raises ModelError with the reasons if none does: before any weight is read.
    """
    reasons = []
    for candidate in _candidates(source, packing, device, compute_dtype):
        reason = _cached(source, candidate, packing, device, compute_dtype, cache)
        if reason is None:
            return Attention(candidate, _describe(candidate))
        reasons.append(f"{_describe(candidate)}: {reason}")
    asked = "\n  ".join(reasons)
    wanted = "write `data.packing: false`" if packing else "name another `model.attention`"
    raise ModelError(f"model.attention: {source.section.attention} cannot run {source.model_class.__name__}; {wanted}\n  {asked}")


def _candidates(source: Source, packing: bool, device: torch.device, compute_dtype: torch.dtype) -> list[str]:
    asked = source.section.attention
    if asked == "sdpa":
        return [DOCUMENT_ATTENTION if packing else "sdpa"]
    if asked != "auto":
        return [asked]
    flash = ["flash_attention_2"] if packing and _flash_runs(device, compute_dtype) else []
    return [*flash, *([DOCUMENT_ATTENTION] if packing else []), "sdpa", "eager"]


def _flash_runs(device: torch.device, compute_dtype: torch.dtype) -> bool:
    return device.type == "cuda" and compute_dtype == torch.bfloat16 and is_flash_attn_2_available()


def _describe(implementation: str) -> str:
    return "sdpa, one call per document" if implementation == DOCUMENT_ATTENTION else implementation


def _cached(
    source: Source, attention: str, packing: bool, device: torch.device, compute_dtype: torch.dtype, cache: Path | None
) -> str | None:
    """`_try` once per config, implementation, device and version of what it depends on."""
    if cache is None:
        return _try(source, attention, packing, device, compute_dtype)
    versions = [version(package) for package in ("torch", "transformers", "meshtune")]
    facts = [source.config.to_json_string(use_diff=False), attention, packing, device.type, str(compute_dtype), versions]
    file = cache / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, KeyError):
        reason = _try(source, attention, packing, device, compute_dtype)
    cache.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{torch.initial_seed() % 10**6}.tmp")
    beside.write_text(json.dumps({"reason": reason}), encoding="utf-8")
    beside.replace(file)
    return reason


@torch.no_grad()
def _try(source: Source, attention: str, packing: bool, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """None if the implementation runs this architecture exactly, else why not."""
    dtype = compute_dtype if attention.startswith("flash") else torch.float32
    if attention == DOCUMENT_ATTENTION and source.section.attention == "sdpa" and not source.model_class._supports_sdpa:
        return "this architecture has no scaled-dot-product attention; `eager` or `auto` would work"
    try:
        model = CausalLM(twin(source, attention, device, dtype))
        ids, positions, lengths = _packed_row(model, device)
        reason = _head_apart(model, ids[:, : lengths[0]], positions[:, : lengths[0]], _TOLERANCE[dtype])
        for training in (True, False) if packing else ():
            reason = reason or _isolated(source, model.train(training), ids, positions, lengths, _TOLERANCE[dtype])
        return reason
    except (ModelError, ValueError, ImportError, RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def _packed_row(model: CausalLM, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    vocab = model.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocab - 1), vocab, (1, sum(_LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    return ids.to(device), positions.to(device), list(_LENGTHS)


def _head_apart(model: CausalLM, ids: Tensor, positions: Tensor, tolerance: float) -> str | None:
    whole = model.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    hidden = model.hidden_states(ids, positions, None)[0]
    apart = torch.cat([model.head(chunk) for chunk in hidden.split(4)])
    error = _relative_difference(apart, whole)
    if error <= tolerance:
        return None
    return f"its head run on chosen positions differs from its own logits by {error:.1e}"


def _isolated(
    source: Source, model: CausalLM, ids: Tensor, positions: Tensor, lengths: list[int], tolerance: float
) -> str | None:
    """The packed row against each document alone, on the same weights."""
    reference = _reference(source, model)
    alone = [
        reference.hidden_states(part, position, None)[0]
        for part, position in zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)
    ]
    with documents(lengths):
        packed = model.hidden_states(ids, positions, None)[0]
    error = _relative_difference(packed, torch.cat(alone))
    if error <= tolerance:
        return None
    return f"a packed row changes a document's hidden states by {error:.1e} of what they are alone"


def _reference(source: Source, model: CausalLM) -> CausalLM:
    """The same weights under the implementation that transformers itself would run on one document."""
    parameter = next(model.model.parameters())
    attention = "sdpa" if source.model_class._supports_sdpa else "eager"
    reference = twin(source, attention, parameter.device, parameter.dtype)
    reference.load_state_dict(model.model.state_dict())
    return CausalLM(reference)


def _relative_difference(found: Tensor, wanted: Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return ((found - wanted).float().abs().max() / wanted.float().abs().max().clamp_min(1e-12)).item()
