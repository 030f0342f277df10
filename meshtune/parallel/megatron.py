"""NVIDIA's Megatron-FSDP in the place of FSDP2: `distributed.strategy: megatron_fsdp`.

Written from the package's source (0.6.1) and not yet run: it needs a CUDA device (docs/decisions/0013). Weights are loaded whole
on each rank; then the package keeps their shards, flat buffers cut without regard to rows that would be equal on all ranks. So
the rows of a rank are asked of the others once, and kept as its `Piece` of each parameter, by which checkpoints and exports
know it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshtune.layout import Layout
from meshtune.layout.pieces import Piece, set_piece

__all__ = ["MegatronShards", "problems"]

_KEY = "distributed.strategy"
_INSTEAD = "write `strategy: fsdp2`"


def problems(layout: Layout) -> Iterator[tuple[str, str]]:
    """(key, message) of what keeps the strategy from running here."""
    if layout.strategy != "megatron_fsdp":
        return
    if importlib.util.find_spec("megatron_fsdp") is None:
        yield (
            _KEY,
            f"megatron_fsdp needs a package that is not installed: pip install 'meshtune[megatron-fsdp]', or {_INSTEAD}",
        )
    if layout.device_type != "cuda":
        yield _KEY, f"megatron_fsdp runs on CUDA devices, found {layout.device_type}; {_INSTEAD}"


class MegatronShards:
    """Calls `root`, whose weights are loaded and whose `units` Megatron-FSDP now shards. Parameters of `root` that an optimizer
    is to have are there from now on, except inside a call."""

    def __init__(self, root: nn.Module, units: list[nn.Module], layout: Layout):
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        _ = layout.data_parallel_mesh  # makes the view of dp_shard and cp
        name = "fsdp" if layout.size("cp") > 1 else "dp_shard"
        self._wrapped: Any = fully_shard_model(
            module=root,
            device_mesh=layout.mesh[(name, "tp")],
            dp_shard_dim=name,
            tp_dim="tp",  # of one rank: without the name, the package does not shard a plain tensor
            fsdp_unit_modules=list({type(unit) for unit in units}),
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32),
            calculate_per_token_loss=True,  # the sum of gradients: what a loss is divided by, it is divided by before
            sync_model_each_microbatch=True,
        )
        self._wrapped._replace_param_with_distributed_if_needed()
        _tell_pieces(root)
        self._fresh = True

    def __call__(self, *args: Any) -> Any:
        self._begin()
        output = self._wrapped(*args)
        if not torch.is_grad_enabled():
            self._wrapped._replace_param_with_distributed_if_needed()
        return output

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return 1

    def set_last_micro_batch(self, last: bool) -> None:
        """Shards are reduced at each micro-batch and added up."""

    def settled_late(self) -> tuple[str, ...]:
        """No gradient is settled after the backward."""
        return ()

    def settle_gradients(self) -> None:
        """Call after the last backward of a step: the next forward is then one of another step, with other weights."""
        self._fresh = True

    def _begin(self) -> None:
        """Before the first forward of a step: weights are those that the optimizer, or a checkpoint, has left."""
        if self._fresh:
            self._wrapped.install_optimized_model_weights()
            self._wrapped.zero_grad_buffer()
            self._fresh = not torch.is_grad_enabled()


def _tell_pieces(root: nn.Module) -> None:
    """Say on each module which rows of its parameters this rank holds. Every rank must call it."""
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    for module in root.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                chunk = gather_and_compute_chunk_metadata(parameter)
                span = (chunk.offsets[0], chunk.sizes[0])
                set_piece(module, name, Piece("fsdp", tuple(parameter.shape), 0, (span,)))
