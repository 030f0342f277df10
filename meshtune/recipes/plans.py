"""The plan of a model on a layout: declared by `models`, and proved here on a twin before any weight is read.

Each region of each kind of block is run once whole and once cut, its ranks as threads: what the block puts out, and every
gradient, must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from meshtune.errors import LayoutError, ModelError
from meshtune.layout import Layout, Plan
from meshtune.layout.experts import problems as misfits
from meshtune.layout.pieces import named_pieces
from meshtune.layout.simulated import simulate
from meshtune.models.blocks import unit_names
from meshtune.models.experts import experts_modules
from meshtune.models.plans import derive
from meshtune.models.plans.derive import Findings, find
from meshtune.models.plans.regions import head_count, trace
from meshtune.models.plans.tables import roles
from meshtune.models.routers import balancing, disproof
from meshtune.models.shrink import Degrees
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, miniature_config, one_line, row_of_tokens
from meshtune.parallel.tensor import parallelize
from meshtune.recipes import planning

_TOKENS = 12
_NO_EXPERTS = "distributed.ep_size: {} has no effect on {}, which has no experts; write ep_size: 1"
_TOLERANCE = 1e-4


def find_plan(plan: planning.Plan) -> Findings | None:
    """What must be tried before a model can be cut for a layout; None where nothing must."""
    _check_balancing(plan.source)
    size = plan.layout.size("tp")
    return None if size == 1 else findings(plan.source, size, plan.recipe.distributed.plan)


def _check_balancing(source: Source) -> None:
    """A load-balancing loss that is not transformers' own is none. Raises ModelError."""
    if not getattr(source.config.get_text_config(decoder=True), "output_router_logits", False):
        return
    twin = build_twin(source, miniature_config(source, Degrees(experts=2)), "eager", torch.device("cpu"))
    reason = disproof(twin, row_of_tokens(twin, _TOKENS))
    if reason is not None:
        raise ModelError(
            f"model.name: the config of {type(twin).__name__} sets output_router_logits, but its load-balancing loss is not "
            f"known: {reason}; set it to false in config.json"
        )


def declare(model: PreTrainedModel, found: Findings | None, layout: Layout) -> Plan:
    """The plan of `model` (whole, on meta) on a layout. Raises LayoutError where something cannot be shared out."""
    plan = Plan(units=tuple(unit_names(model))) if found is None else derive.declare(model, found, layout.size("tp"))
    if layout.ep > 1:
        experts = experts_modules(model)
        problems = (
            list(misfits(experts, layout.ep)) if experts else [_NO_EXPERTS.format(layout.ep, type(model).__name__)]
        )
        if problems:
            raise LayoutError("\n".join(problems))
        plan = plan.sharing_out(experts)
    return replace(plan, balancing=balancing(model))


def findings(source: Source, size: int, asked: Mapping[str, str] | None = None) -> Findings:
    """How a model of `source` can be cut among `size` tp ranks; `asked` is the recipe's `distributed.plan`.

    Raises LayoutError with what stands in the way.
    """
    twin = build_twin(source, miniature_config(source, Degrees(heads=size)), "eager", torch.device("cpu"))
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
        reason = self._try(block, unit, plan, own_heads=True)
        # Only attention reads what blocks before it have left, and this region may have none.
        return None if reason is None or self._try(block, unit, plan, own_heads=False) is None else reason

    def _try(self, block: nn.Module, unit: str, plan: Plan, own_heads: bool) -> str | None:
        try:
            runs = simulate(self._layout, lambda layout: self._cut(block, self.calls[unit], plan, layout, own_heads))
        except Exception as error:
            return f"cut, it does not run ({one_line(error)})"
        return next((problem for run in runs if (problem := self._whole[unit].differs(run)) is not None), None)

    def _cut(self, block: nn.Module, call: _Call, plan: Plan, layout: Layout, own_heads: bool) -> _Run:
        own = copy.deepcopy(block)
        parallelize(own, plan, layout)
        peers = layout.peers("tp")
        run = _Run.of(own, call, (peers.rank, peers.size) if own_heads else (0, 1))
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
    def of(cls, block: nn.Module, call: _Call, part: tuple[int, int] = (0, 1)) -> _Run:
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


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
