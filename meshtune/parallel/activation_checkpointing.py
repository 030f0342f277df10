"""What the backward needs of the forward: kept, computed again, or moved to the memory of the CPU until then.

Checkpointing goes through the hook that transformers models offer, so that no parameter changes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshtune.errors import ModelError

Mode = Literal["none", "full", "selective"]

Kind = Literal["matmul", "attention"]
KINDS: tuple[Kind, ...] = ("matmul", "attention")

_ATEN = torch.ops.aten
# Dear to compute again, cheap to keep.
_KEPT: dict[Kind, set[Any]] = {
    "matmul": {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_mm.default,
    },
    "attention": {
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    },
}
_WORTH_MOVING_BYTES = 4096


Reopening = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Called in a forward: what opens, when the block runs again, the contexts that are open now."""


def checkpoint_activations(
    model: Any, mode: Mode, reopening: Reopening | None = None, every: int = 1, keep: Collection[Kind] = KINDS
) -> None:
    """Keep only a block's input (`full`), or also the outputs of the operations `keep` (`selective`); of each block, or of one in
    `every`.

    Raises ModelError if the architecture has no place for it.
    """
    if mode == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"training.activation_checkpointing: {type(model).__name__} does not support it in transformers; write `none`"
        )
    kept = set().union(*(_KEPT[kind] for kind in keep)) if mode == "selective" else None
    settings: dict[str, Any] = {"use_reentrant": False, "context_fn": partial(_contexts, kept, reopening)}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings, every_n_layers=every)
    # Only reentrant checkpointing needs inputs that require gradients; of frozen embeddings they would take the backward through
    # all the frozen blocks above them, in vain.
    model.disable_input_require_grads()


def offloaded(device_type: str) -> saved_tensors_hooks:
    """Open around a forward: what it saves for its backward waits in the memory of the CPU, on CUDA in pinned memory, with
    copies that the host does not wait for. Weights and what is small stay where they are."""
    theirs = save_on_cpu(pin_memory=True, device_type="cuda" if device_type == "cpu" else device_type)

    def pack(tensor: Tensor) -> Any:
        # Weights that FSDP2 has gathered are freed and gathered again; a copy would be stale, and as large as the model.
        stays = type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter)
        return tensor if stays or tensor.nbytes < _WORTH_MOVING_BYTES else theirs.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else theirs.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)


def _contexts(
    kept: Collection[Any] | None, reopening: Reopening | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a block's forward, and around its second run in the backward."""
    first, again = (
        (nullcontext(), nullcontext()) if kept is None else create_selective_checkpoint_contexts(partial(_policy, kept))
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


def _policy(kept: Collection[Any], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
