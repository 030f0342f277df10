"""Try attention implementations on a twin: does a batch give every document what the document has alone?

The reference is transformers' own eager attention, which each model file spells out, on one document at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from meshtune.data.batch import Batch
from meshtune.data.collate import collate_packed, collate_padded
from meshtune.errors import LayoutError, ModelError
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.causal_lm import CausalLM
from meshtune.models.source import Source
from meshtune.models.trial_over_ranks import compare_cut
from meshtune.models.twin import build_twin, one_line, row_of_tokens, twin_config, with_positions
from meshtune.models.whole_sequences import give_whole_sequences, kinds_of_layers

_LENGTHS = (11, 3, 9)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


class Trial:
    """Tries implementations for one source, packed or padded. Nothing is built before the first try."""

    def __init__(self, source: Source, packing: bool, device: torch.device, passes_positions: bool = False):
        """`passes_positions`: a packed row may have more tokens than the config has positions, though no document has."""
        self.source, self.packing, self.device, self.passes_positions = source, packing, device, passes_positions
        self._references: dict[torch.dtype, Reference] = {}

    def __call__(self, implementation: str, dtype: torch.dtype) -> str | None:
        """None if the implementation runs this architecture exactly, else why not, in one line.

        Raises ModelError where no implementation would do.
        """
        reference = self._reference(dtype)
        if implementation == DOCUMENT_ATTENTION and self.source.section.attention == "sdpa" and not self._has_sdpa:
            return "this architecture has no scaled-dot-product attention in transformers"
        try:
            model = self._twin(implementation, dtype)
            problem = reference.compare(model.train()) or reference.compare(model.eval())
        except Exception as error:
            return _reason(error)
        return problem or (self._fails_past_positions(implementation, dtype) if self.passes_positions else None)

    def cut(self, method: str) -> tuple[str | None, tuple[str, ...]]:
        """None if sequences cut over ranks, which attend by `method`, give this architecture what whole ones do, else why not;
        and the classes of layers that must have whole ones for it, no more of them than are needed.

        Ranks are tried on the CPU. A twin may have fewer heads than `ulysses` can share out; what an architecture does beside
        attention shows by any method.
        """
        if self.device.type != "cpu":
            return Trial(self.source, self.packing, torch.device("cpu")).cut(method)
        reason = self._cut(method, ())
        if reason is None:
            return None, ()
        whole = kinds_of_layers(self._twin(DOCUMENT_ATTENTION, torch.float32).model)
        if self._cut(method, whole) is not None:
            return reason, ()
        for kind in whole:
            fewer = tuple(name for name in whole if name != kind)
            if self._cut(method, fewer) is None:
                whole = fewer
        return None, whole

    def _cut(self, method: str, whole: tuple[str, ...]) -> str | None:
        try:
            reference, twin = self._reference(torch.float32), self._twin(DOCUMENT_ATTENTION, torch.float32).model
            give_whole_sequences(twin, whole)
            try:
                return compare_cut(twin, reference, method)
            except LayoutError:
                return compare_cut(twin, reference, "allgather")
        except ModelError:
            raise
        except Exception as error:
            return _reason(error)

    def _fails_past_positions(self, implementation: str, dtype: torch.dtype) -> str | None:
        """Positions restart with each document, but tables and masks may be as long as the config's positions."""
        config = with_positions(self._config, max(_LENGTHS))
        try:
            alone = CausalLM(build_twin(self.source, config, "eager", self.device, dtype)).train()
            reference = Reference.of(alone, row_of_tokens(alone.model, sum(_LENGTHS)), True, 10 * _TOLERANCE[dtype])
        except Exception:
            return None  # the architecture has no such config to try
        try:
            problem = reference.compare(
                CausalLM(build_twin(self.source, config, implementation, self.device, dtype)).train()
            )
        except Exception as error:
            problem = _reason(error)
        if problem is None:
            return None
        return (
            f"a packed micro-batch longer than the {self.source.max_positions} positions of the model {problem}; "
            "write `training.per_device_batch_size: 1`, or a smaller `data.max_seq_length`"
        )

    @property
    def _has_sdpa(self) -> bool:
        return bool(self.source.model_class._supports_sdpa)

    @cached_property
    def _config(self) -> PreTrainedConfig:
        return twin_config(self.source)

    def _twin(self, implementation: str, dtype: torch.dtype) -> CausalLM:
        return CausalLM(build_twin(self.source, self._config, implementation, self.device, dtype))

    def _reference(self, dtype: torch.dtype) -> Reference:
        if dtype not in self._references:
            config = self._config
            try:
                model = CausalLM(build_twin(self.source, config, "eager", self.device, dtype)).train()
                row = row_of_tokens(model.model, sum(_LENGTHS))
                tolerance = max(_TOLERANCE[dtype], 10 * _rounding(model, row))
                problem = _sees_later_positions(model, row, tolerance) or _head_is_not_apart(model, row, tolerance)
                if problem is None:
                    self._references[dtype] = Reference.of(model, row, self.packing, tolerance)
            except Exception as error:
                problem = f"its twin does not run ({one_line(error)})"
            if problem is not None:
                raise ModelError(f"model.name: {self.source.model_class.__name__}: {problem}")
        return self._references[dtype]


@dataclass(frozen=True)
class Reference:
    """A batch, and what each of its documents is alone: hidden states [N, hidden], gradient of the input embedding."""

    batch: Batch
    probe: Tensor
    hidden_states: Tensor
    gradient: Tensor
    tolerance: float

    @classmethod
    def of(cls, model: CausalLM, row: Tensor, packing: bool, tolerance: float) -> Reference:
        parts = row.split(_LENGTHS)
        documents = [(part.numpy(), np.ones(len(part), dtype=bool)) for part in parts]
        batch = collate_packed(documents) if packing else collate_padded(documents, pad_token_id=int(row[0]))
        alone = torch.cat([_hidden_states(model, part) for part in parts])
        probe = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1)).to(alone)
        return cls(batch.to(alone.device), probe, alone.detach(), _gradient(model, alone, probe), tolerance)

    def compare(self, model: CausalLM) -> str | None:
        """None if the batch agrees with its documents alone."""
        batch = self.batch
        with model.documents(batch):
            found = model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask)
            found = found[0] if batch.attention_mask is None else found[batch.attention_mask]
            gradient = _gradient(model, found, self.probe) if model.training else None
        return self.problem(found, gradient, f"a {'packed' if batch.packed else 'padded'} batch")

    def problem(self, found: Tensor, gradient: Tensor | None, cause: str) -> str | None:
        """None if hidden states [N, hidden] and, where there is one, the gradient are those of the documents alone."""
        if (error := _difference(found, self.hidden_states)) > self.tolerance:
            return f"{cause} changes a document's hidden states by {error:.1e} of what they are alone"
        if gradient is not None and (error := _difference(gradient, self.gradient)) > 10 * self.tolerance:
            return f"{cause} changes the gradient by {error:.1e} of what its documents give alone"
        return None


def _hidden_states(model: CausalLM, ids: Tensor) -> Tensor:
    """Of one document, as the model itself numbers its positions: [T] to [T, hidden]."""
    ids = ids[None].to(next(model.parameters()).device)
    return model.hidden_states(ids, torch.arange(ids.shape[1], device=ids.device)[None], None)[0]


def _embedding_weight(model: CausalLM) -> Tensor:
    weight = model.model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _gradient(model: CausalLM, hidden_states: Tensor, probe: Tensor) -> Tensor:
    """Gradient of the input embedding, for a loss that weighs every hidden state by `probe`."""
    weight = _embedding_weight(model)
    return torch.autograd.grad((hidden_states * probe).sum(), weight)[0]


@torch.no_grad()
def _rounding(model: CausalLM, row: Tensor) -> float:
    """What an error in the last digit of the embedding comes to in the hidden states: no comparison can be closer."""
    weight = _embedding_weight(model)
    exact, hidden_states = weight.clone(), _hidden_states(model, row)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(weight)
    weight.mul_(1 + torch.finfo(weight.dtype).eps * noise)
    error = _difference(_hidden_states(model, row), hidden_states)
    weight.copy_(exact)
    return error


@torch.no_grad()
def _sees_later_positions(model: CausalLM, row: Tensor, tolerance: float) -> str | None:
    whole, cut = _hidden_states(model, row), len(row) // 2
    if whole.ndim != 2 or len(whole) != len(row):
        return f"its head runs on a tensor of shape {tuple(whole.shape)} for {len(row)} positions, not on one vector for each"
    error = _difference(_hidden_states(model, row[:cut]), whole[:cut])
    if error <= tolerance:
        return None
    return (
        f"with this config a position sees later ones (they change its hidden state by {error:.1e} of itself), so predicting "
        "the next token would teach it nothing; the config of an encoder needs `is_decoder: true`"
    )


def _head_is_not_apart(model: CausalLM, row: Tensor, tolerance: float) -> str | None:
    """The head, run on chosen positions, against the logits of the model's own forward."""
    with torch.no_grad():
        whole = model.model(input_ids=row[None].to(next(model.parameters()).device), use_cache=False).logits[0]
        hidden_states = _hidden_states(model, row)
        apart = torch.cat([model.head(chunk) for chunk in hidden_states.split(4)])
    error = _difference(apart, whole)
    if error > tolerance:
        return f"its head run on chosen positions differs from its own logits by {error:.1e}"
    foreign = _foreign_parameters(model, hidden_states[:2])
    return f"its head also reads {foreign[0]}, which is not part of its output embedding" if foreign else None


def _foreign_parameters(model: CausalLM, hidden_states: Tensor) -> list[str]:
    """Parameters on the way from the head's input to the logits that are not the head's own."""
    own = {id(parameter) for parameter in model.head_parameters}
    others = {n: p for n, p in model.model.named_parameters() if id(p) not in own and p.requires_grad}
    logits = model.head(hidden_states)
    gradients = torch.autograd.grad(logits.sum(), list(others.values()), allow_unused=True)
    return [name for name, gradient in zip(others, gradients, strict=True) if gradient is not None]


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return float("inf")
    return ((found - wanted).float().abs().max() / wanted.float().abs().max().clamp_min(1e-12)).item()


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError | ImportError) and "support" in str(error):
        return "transformers does not offer it for this architecture, or not on this machine"
    if isinstance(error, KeyError) and error.args == (DOCUMENT_ATTENTION,):
        return "this architecture does not call attention through transformers' attention interface"
    return f"does not run ({one_line(error)})"
