"""Activation checkpointing through the hook that transformers models offer, so that no parameter changes its name."""

from __future__ import annotations

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


def checkpoint_activations(model: Any, mode: Mode) -> None:
    """Keep only each block's input (`full`), or also the outputs of matrix products and attention (`selective`).

    Raises ModelError if the architecture has no place for it.
    """
    if mode == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"training.activation_checkpointing: {type(model).__name__} does not support it in transformers; write `none`"
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
