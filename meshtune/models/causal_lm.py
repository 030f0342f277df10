"""A transformers causal LM seen as two halves, trunk and head, without touching it.

The head's half lets a loss run it on chosen positions, a chunk at a time, with the architecture's own logit scaling and
soft-capping. Both halves are the model's own `forward`, called on a shallow view of the model: same class, same
parameters, another module in one place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput

from meshtune.errors import ModelError
from meshtune.layout import Layout
from meshtune.layout.pieces import piece_of
from meshtune.layout.span import Span
from meshtune.losses import VocabularyPart
from meshtune.models.adapters.view import base_view
from meshtune.models.documents import ContextParallel, documents, positions_restart
from meshtune.models.whole_sequences import give_whole_sequences


class _Captured(Exception):
    """Carries the head's input out of the model's forward."""

    def __init__(self, hidden_states: Tensor):
        self.hidden_states = hidden_states


class _Left(Exception):
    """Carries the output of a span's last block out of the objective."""

    def __init__(self, hidden_states: Tensor):
        self.hidden_states = hidden_states


class _StandIn(nn.Module):
    """Stands where another module stands, and answers for its attributes (a head's `weight.dtype`, say)."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _CapturingHead(_StandIn):
    """Ends the forward where the head would run."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        raise _Captured(hidden_states)


class _GivenInputHead(_StandIn):
    """Runs the real head on a given input, whatever it is called with."""

    def __init__(self, original: nn.Module, hidden_states: Tensor):
        super().__init__(original)
        self.__dict__["_hidden_states"] = hidden_states

    def forward(self, _hidden_states: Tensor) -> Tensor:
        return self.__dict__["_original"](self.__dict__["_hidden_states"])


class _Entered(_StandIn):
    """Runs a block on a given input, whatever hidden states it is called with."""

    def __init__(self, original: nn.Module, received: Tensor):
        super().__init__(original)
        self.__dict__["_received"] = received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original, received = self.__dict__["_original"], self.__dict__["_received"]
        return original(received, *args[1:], **kwargs) if args else original(**{**kwargs, "hidden_states": received})


class _CapturingBlock(_StandIn):
    """Ends the forward with the hidden states that a block is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left(args[0] if args else kwargs["hidden_states"])


class _LeftBehind(_StandIn):
    """Ends the forward with a block's output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["_original"](*args, **kwargs)
        raise _Left(output if isinstance(output, Tensor) else output[0])


class _GivenTrunk(_StandIn):
    """Returns a given output at once, also when the forward calls a part of the trunk."""

    def __init__(self, original: nn.Module, output: Any):
        super().__init__(original)
        self.__dict__["_output"] = output

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return _GivenTrunk(value, self.__dict__["_output"]) if isinstance(value, nn.Module) else value

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.__dict__["_output"]


class CausalLM(nn.Module):
    """Runs an objective on a transformers causal LM, whose parameters stay where and as they are.

    It is the root that data parallelism wraps, so everything that an objective does with the head happens inside its
    forward. `model` is the untouched transformers model; its names are the names of every checkpoint. With `context`, batches
    are this rank's part of the tokens; layers of the classes `whole` are given whole sequences all the same.
    """

    def __init__(self, model: PreTrainedModel, context: ContextParallel | None = None, whole: Sequence[str] = ()):
        super().__init__()
        self.model = model
        self.context = context
        self._whole = tuple(whole)
        head = model.get_output_embeddings()
        path = next((name for name, module in model.named_modules() if module is head), None)
        if head is None or path is None:
            raise ModelError(f"{type(model).__name__} has no output embedding, so it is not a causal language model")
        self._head_path = path
        self._trunk_path = _trunk_path(model, path)
        self.vocabulary: VocabularyPart | None = None
        """The rows of the vocabulary that the head has where tensor parallelism cuts it."""
        self.gradient_scale = 1.0
        """What a loss sum is multiplied with before its backward, where gradients are computed in float16; else 1."""
        self._trunk_width = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
        self.around_trunk: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What is open around the trunk's forward, and not around the head's."""
        self._span = Span()
        self._received: Tensor | None = None

    def set_layout(self, layout: Layout) -> None:
        """Called when `model` has been cut for `layout`: over which ranks sequences and vocabulary go on."""
        self.context = ContextParallel(layout.peers("cp"), layout.cp_method) if layout.size("cp") > 1 else None
        if self.context is not None:
            give_whole_sequences(self.model, self._whole)
        head = base_view(self.model).get_submodule(self._head_path)
        piece = piece_of(head, "weight")
        if piece is not None:
            self.vocabulary = VocabularyPart(piece.spans[0][0], piece.shape[0], layout.peers(piece.axis))

    def forward(
        self,
        objective: Callable[[CausalLM, Any], Any],
        batch: Any,
        span: Span | None = None,
        received: Tensor | None = None,
    ) -> Any:
        """What `objective` returns; of a span that ends at a block, that block's output. `received` is a later span's input."""
        self._span, self._received = span or Span(), received
        try:
            with self.documents(batch):
                return objective(self, batch)
        except _Left as left:
            return left.hidden_states
        finally:
            self._span, self._received = Span(), None

    def documents(self, batch: Any) -> AbstractContextManager[None]:
        """Open around the forward of a batch, so that attention knows where its documents end and which ranks hold the rest."""
        lengths = batch.document_lengths
        return documents(None if lengths is None else [int(n) for n in lengths], self.context)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The head's input at every position: [B, T] token ids and positions to [B, T, hidden].

        Positions go to the model only where they restart, with documents or with a chunk of a sequence. For any other row the
        model's own are right, and some models have no other (learnt positions that begin at an offset).
        """
        view = _with_modules(self.model, self._begin_and_end())
        given = {"position_ids": position_ids} if positions_restart() else {}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask.long()
        try:
            with self.around_trunk():
                type(self.model).forward(view, input_ids=input_ids, use_cache=False, **given)
        except _Captured as captured:
            return captured.hidden_states
        raise ModelError(f"{type(self.model).__name__} did not call its output embedding in its forward")

    def input_of(self, block: str, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The hidden states that a block is given. Call it as an objective: the forward ends there."""
        self._span = Span(replaced={block: _CapturingBlock(self.model.get_submodule(block))})
        return self.hidden_states(input_ids, position_ids, attention_mask)

    def _begin_and_end(self) -> dict[str, nn.Module]:
        """What stands in the place of modules where the pass at hand begins and ends."""
        span, received, modules = self._span, self._received, dict(self._span.replaced)
        if span.enter is not None:
            assert received is not None
            modules[span.enter] = _Entered(self.model.get_submodule(span.enter), received)
        if span.leave is None:
            modules[self._head_path] = _CapturingHead(self.model.get_submodule(self._head_path))
        else:
            last = modules[span.leave] if span.leave in modules else self.model.get_submodule(span.leave)
            modules[span.leave] = _LeftBehind(last)
        return modules

    def head(self, hidden_states: Tensor) -> Tensor:
        """Final logits [n, vocab] of head inputs [n, hidden], scaled and capped as the architecture does."""
        hidden_states = hidden_states.unsqueeze(0)
        output = _trunk_output(self._as_wide_as_the_trunk(hidden_states))
        modules: dict[str, nn.Module] = {
            self._trunk_path: _GivenTrunk(self.model.get_submodule(self._trunk_path), output),
            self._head_path: _GivenInputHead(self.model.get_submodule(self._head_path), hidden_states),
        }
        view = _with_modules(self.model, modules)
        ids = torch.zeros(hidden_states.shape[:2], dtype=torch.long, device=hidden_states.device)
        return type(self.model).forward(view, input_ids=ids, use_cache=False, return_dict=True).logits.squeeze(0)

    def _as_wide_as_the_trunk(self, hidden_states: Tensor) -> Tensor:
        """What stands between trunk and head runs in vain, on the head's own input or on zeros where its width differs."""
        if self._trunk_width in (None, hidden_states.shape[-1]):
            return hidden_states
        return hidden_states.new_zeros(()).expand(*hidden_states.shape[:2], self._trunk_width)

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters that `head` reads: the output embedding's weight and bias, where there are."""
        return list(self.model.get_submodule(self._head_path).parameters())


def _trunk_path(model: PreTrainedModel, head_path: str) -> str:
    """Qualified name of the largest module that holds the input embedding and not the head."""
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    head = head_path.split(".")
    parts = path.split(".")
    shared = next((i for i, (a, b) in enumerate(zip(parts, head, strict=False)) if a != b), min(len(parts), len(head)))
    trunk = ".".join(parts[: shared + 1])
    if not trunk or model.get_submodule(trunk) is embedding:
        raise ModelError(f"{type(model).__name__} does not keep its trunk and its head in separate modules")
    return trunk


def _trunk_output(hidden_states: Tensor) -> ModelOutput:
    class Output(MoeModelOutputWithPast):
        """What a trunk may return beyond hidden states is absent, whatever it is called."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    return Output(last_hidden_state=hidden_states)


def _with_modules(model: nn.Module, replacements: dict[str, nn.Module]) -> nn.Module:
    """A shallow copy of `model` with other modules at the given paths; the model itself is not changed."""
    view = _shallow(model)
    for path, module in replacements.items():
        *parents, name = path.split(".")
        parent = view
        for part in parents:
            child = _shallow(parent._modules[part])
            parent._modules[part] = child
            parent = child
        parent._modules[name] = module
    return view


def _shallow(module: nn.Module | None) -> nn.Module:
    assert module is not None
    view = copy.copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    return view
