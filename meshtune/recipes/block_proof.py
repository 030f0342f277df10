"""Blocks of a twin, run whole and cut over simulated tensor-parallel ranks: what they put out and every gradient must agree."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from meshtune.layout import Layout, Plan
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import named_pieces
from meshtune.layout.simulated import simulate
from meshtune.models.twin import one_line
from meshtune.parallel.tensor import parallelize

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Call:
    args: Any
    kwargs: Any


class Calls:
    """The arguments of the first call of each block."""

    def __init__(self, model: PreTrainedModel, units: list[str]):
        self._found: dict[str, Call] = {}
        self._handles = [
            model.get_submodule(unit).register_forward_pre_hook(self._keep(unit), with_kwargs=True) for unit in units
        ]

    def _keep(self, unit: str) -> Any:
        def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._found.setdefault(unit, Call(_fresh(args), _fresh(kwargs)))

        return keep

    def stop(self) -> dict[str, Call]:
        for handle in self._handles:
            handle.remove()
        return self._found


def _fresh(values: Any, part: tuple[int, int] = (0, 1)) -> Any:
    """The same values, activations as leaves of their own.

    What blocks write down for later blocks is copied: keys and values [batch, heads, ...], of which a rank, `part` (rank, size),
    has its own heads.
    """
    rank, size = part

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        copied = copy.copy(value)
        if isinstance(copied, MutableMapping):
            for key, state in copied.items():
                copied[key] = tree_map(own_heads, state)
        return copied

    def own_heads(value: Any) -> Any:
        cut = isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] % size == 0
        return one(value.chunk(size, 1)[rank]) if cut else one(value)

    return tree_map(one, values)


class BlockProof:
    """Runs a block whole and cut."""

    def __init__(self, twin: PreTrainedModel, calls: Mapping[str, Call], size: int):
        self.twin, self.calls, self.size = twin, calls, size
        self._whole: dict[str, _Run] = {}
        self._layout = Layout({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": size})

    def __call__(self, unit: str, plan: Plan) -> str | None:
        block = self.twin.get_submodule(unit)
        if unit not in self._whole:
            self._whole[unit] = _Run.of(block, self.calls[unit])
        reason = self._try(block, unit, plan, own_heads=True)
        # Only attention reads what blocks before it have left, and this region may have none.
        return None if reason is None or self._try(block, unit, plan, own_heads=False) is None else reason

    def _try(self, block: nn.Module, unit: str, plan: Plan, own_heads: bool) -> str | None:
        try:
            runs = simulate(self._layout, lambda layout: self._cut(block, self.calls[unit], plan, layout, own_heads))
        except Exception as error:
            return f"cut, it does not run ({one_line(error)})"
        return next((problem for run in runs if (problem := self._whole[unit].differs(run)) is not None), None)

    def _cut(self, block: nn.Module, call: Call, plan: Plan, layout: Layout, own_heads: bool) -> _Run:
        own = copy.deepcopy(block)
        parallelize(own, plan, layout)
        peers = layout.peers("tp")
        run = _Run.of(own, call, (peers.rank, peers.size) if own_heads else (0, 1))
        run.gradients.update(whole_gradients(own, run.gradients, plan.shared, peers))
        return run


@dataclass
class _Run:
    """What a block gave: its hidden states, and the gradients of its inputs and parameters for a loss that weighs every one."""

    output: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, block: nn.Module, call: Call, part: tuple[int, int] = (0, 1)) -> _Run:
        args, kwargs = _fresh(call.args, part), _fresh(call.kwargs, part)
        block.zero_grad(set_to_none=True)
        # Some blocks also hand out their attention weights, which belong to heads and go nowhere.
        output = next(
            leaf for leaf in tree_leaves(block(*args, **kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad
        )
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in block.named_parameters()
        }
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for index, leaf in enumerate(inputs):
            gradients[f"input {index}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return cls(output.detach(), gradients)

    def differs(self, other: _Run) -> str | None:
        """None, or where `other` is not the same."""
        if (error := _difference(other.output, self.output)) > _TOLERANCE:
            return f"cut, its output differs by {error:.1e}"
        floor = max(gradient.abs().max() for gradient in self.gradients.values()) * 1e-3
        for name, wanted in self.gradients.items():
            error = ((other.gradients[name] - wanted).abs().max() / wanted.abs().max().clamp_min(floor)).item()
            if not error < 10 * _TOLERANCE:
                return f"cut, the gradient of {name} differs by {error:.1e}"
        return None


def whole_gradients(
    model: nn.Module, gradients: Mapping[str, Tensor], shared: Collection[str], peers: Peers
) -> dict[str, Tensor]:
    """Of the parameters of which each rank has a part, or a part of the gradient: the gradients of the whole, on every rank."""
    found = {name: peers.all_reduce(gradients[name]) for name in sorted(shared)}
    for name, piece in named_pieces(model).items():
        if name not in gradients:
            continue
        whole, offset = torch.zeros(piece.shape), 0
        for start, length in piece.spans:
            whole.narrow(piece.dim, start, length).copy_(gradients[name].narrow(piece.dim, offset, length))
            offset += length
        found[name] = peers.all_reduce(whole)
    return found


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
