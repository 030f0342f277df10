"""Activation checkpointing through the hook that transformers models offer, so that no parameter changes its name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshtune.errors import ModelError

Mode = Literal["none", "full", "selective"]

_ATEN = torch.ops.aten
# Matrix products and attention: dear to compute again, cheap to keep.
_KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}


Reopening = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Called in a forward: what opens, when the block runs again, the contexts that are open now."""


def checkpoint_activations(model: Any, mode: Mode, reopening: Reopening | None = None) -> None:
    """Keep only each block's input (`full`), or also the outputs of matrix products and attention (`selective`).

    Raises ModelError if the architecture has no place for it.
    """
    if mode == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"training.activation_checkpointing: {type(model).__name__} does not support it in transformers; write `none`"
        )
    settings: dict[str, Any] = {"use_reentrant": False, "context_fn": partial(_contexts, mode, reopening)}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)


def _contexts(
    mode: Mode, reopening: Reopening | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a block's forward, and around its second run in the backward."""
    first, again = (
        create_selective_checkpoint_contexts(_policy) if mode == "selective" else (nullcontext(), nullcontext())
    )
    return first, again if reopening is None else _Both(reopening(), again)


class _Both(AbstractContextManager[None]):
    """Two contexts, the first of which is made when it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]], other: AbstractContextManager[Any]):
        self._make, self._other, self._open = make, other, ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._make())
        self._open.enter_context(self._other)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._open.__exit__(*raised)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
