"""The plan of a model on a layout: declared by `models`, and proved here on a twin before any weight is read.

Each region of each kind of block is run once whole and once cut, its ranks as threads: what the block puts out, and every
gradient, must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from meshtune.layout import Layout, Plan
from meshtune.layout.pieces import named_pieces
from meshtune.layout.simulated import simulate
from meshtune.models.blocks import unit_names
from meshtune.models.experts import experts_modules
from meshtune.models.plans import derive
from meshtune.models.plans.derive import Findings, find
from meshtune.models.plans.regions import head_count, trace
from meshtune.models.plans.tables import roles
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, one_line, row_of_tokens, twin_config
from meshtune.parallel.tensor import parallelize
from meshtune.recipes import planning

_TOKENS = 12
_TOLERANCE = 1e-4


def find_plan(plan: planning.Plan) -> Findings | None:
    """What must be tried before a model can be cut for a layout; None where nothing must."""
    size = plan.layout.size("tp")
    return None if size == 1 else findings(plan.source, size, plan.recipe.distributed.plan)


def declare(model: PreTrainedModel, found: Findings | None, layout: Layout) -> Plan:
    """The plan of `model` (whole, on meta) on a layout. Raises LayoutError where something cannot be shared out."""
    plan = Plan(units=tuple(unit_names(model))) if found is None else derive.declare(model, found, layout.size("tp"))
    return plan if layout.ep == 1 else plan.sharing_out(experts_modules(model))


def findings(source: Source, size: int, asked: Mapping[str, str] | None = None) -> Findings:
    """How a model of `source` can be cut among `size` tp ranks; `asked` is the recipe's `distributed.plan`.

    Raises LayoutError with what stands in the way.
    """
    twin = build_twin(source, twin_config(source), "eager", torch.device("cpu"))
    units = unit_names(twin)
    calls = _Calls(twin, units)
    row = row_of_tokens(twin, _TOKENS)[None]
    flows = trace(twin, units, lambda: twin(input_ids=row, use_cache=False))
    prover = _Prover(twin, calls.stop(), _proof_size(twin, size))
    return find(twin, flows, roles(twin, asked), prover.size, prover)


def _proof_size(twin: PreTrainedModel, size: int) -> int:
    """As many ranks as asked for, or two where the twin has too few heads for so many."""
    counts = [n for module in twin.modules() if (n := head_count(module))]
    counts += [n for n in [getattr(twin.config.get_text_config(decoder=True), "num_attention_heads", None)] if n]
    return size if all(count % size == 0 for count in counts) else 2


@dataclass(frozen=True)
class _Call:
    args: Any
    kwargs: Any


class _Calls:
    """The arguments of the first call of each block."""

    def __init__(self, model: PreTrainedModel, units: list[str]):
        self._found: dict[str, _Call] = {}
        self._handles = [
            model.get_submodule(unit).register_forward_pre_hook(self._keep(unit), with_kwargs=True) for unit in units
        ]

    def _keep(self, unit: str) -> Any:
        def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._found.setdefault(unit, _Call(_fresh(args), _fresh(kwargs)))

        return keep

    def stop(self) -> dict[str, _Call]:
        for handle in self._handles:
            handle.remove()
        return self._found


def _fresh(values: Any) -> Any:
    """The same values, activations as leaves of their own and dictionaries that a block writes into copied."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return copy.copy(value)

    return tree_map(one, values)


class _Prover:
    """Runs a block whole and cut."""

    def __init__(self, twin: PreTrainedModel, calls: Mapping[str, _Call], size: int):
        self.twin, self.calls, self.size = twin, calls, size
        self._whole: dict[str, _Run] = {}
        self._layout = Layout({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": size})

    def __call__(self, unit: str, plan: Plan) -> str | None:
        block = self.twin.get_submodule(unit)
        if unit not in self._whole:
            self._whole[unit] = _Run.of(block, self.calls[unit])
        try:
            runs = simulate(self._layout, lambda layout: self._cut(block, self.calls[unit], plan, layout))
        except Exception as error:
            return f"cut, it does not run ({one_line(error)})"
        return next((problem for run in runs if (problem := self._whole[unit].differs(run)) is not None), None)

    def _cut(self, block: nn.Module, call: _Call, plan: Plan, layout: Layout) -> _Run:
        own = copy.deepcopy(block)
        parallelize(own, plan, layout)
        run = _Run.of(own, call)
        peers = layout.peers("tp")
        for name in sorted(plan.shared):
            run.gradients[name] = peers.all_reduce(run.gradients[name])
        for name, piece in named_pieces(own).items():
            whole = torch.zeros(piece.shape)
            offset = 0
            for start, length in piece.spans:
                whole.narrow(piece.dim, start, length).copy_(run.gradients[name].narrow(piece.dim, offset, length))
                offset += length
            run.gradients[name] = peers.all_reduce(whole)
        return run


@dataclass
class _Run:
    """What a block gave: its hidden states, and the gradients of its inputs and parameters for a loss that weighs every one."""

    output: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, block: nn.Module, call: _Call) -> _Run:
        args, kwargs = _fresh(call.args), _fresh(call.kwargs)
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


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
