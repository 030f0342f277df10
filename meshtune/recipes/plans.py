"""The plan of a model on a layout: declared by `models`, and proved here on a twin before any weight is read.

Each region of each kind of block is run once whole and once cut, its ranks as threads: what the block puts out, and every
gradient, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from meshtune.errors import LayoutError, ModelError
from meshtune.layout import Layout, Plan
from meshtune.layout.experts import problems as misfits
from meshtune.models.blocks import unit_names
from meshtune.models.causal_lm import CausalLM
from meshtune.models.experts import experts_modules
from meshtune.models.plans import derive
from meshtune.models.plans.derive import Findings, find
from meshtune.models.plans.regions import head_count, trace
from meshtune.models.plans.sequences import sequences
from meshtune.models.plans.tables import asked_roles
from meshtune.models.routers import balancing, disproof
from meshtune.models.shrink import Degrees
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, miniature_config, row_of_tokens
from meshtune.parallel.stage_borders import joined_blocks
from meshtune.parallel.stage_trial import fault_of_stages
from meshtune.recipes.block_proof import BlockProof, Calls
from meshtune.recipes.expert_proof import disagreement_over_experts
from meshtune.recipes.model_proof import disagreement, one_row
from meshtune.recipes.objectives import next_token

T = TypeVar("T")

_TOKENS = 12
_ALL_LAYERS = 2**20
_known: dict[tuple[Any, ...], Any] = {}
_NO_EXPERTS = "distributed.ep_size: {} has no effect on {}, which has no experts; write ep_size: 1"


def find_plan(source: Source, layout: Layout, asked: Mapping[str, str] | None = None) -> Findings | None:
    """What must be tried before a model can be cut for a layout; None where nothing must. `asked` is `distributed.plan`."""
    model = (source.model_class, source.config.to_json_string(use_diff=False))
    _once(("balancing", model), lambda: _check_balancing(source))
    if layout.ep > 1:
        _once(("experts", model), lambda: _check_experts(source))
    joined: frozenset[str] = frozenset()
    if layout.size("pp") > 1:
        joined = _once(("stages", model), lambda: _joined_units(source))
    found = Findings()
    if (size := layout.size("tp")) > 1:
        key = (model, size, layout.sequence_parallel, tuple((asked or {}).items()))
        found = _once(("regions", key), lambda: findings(source, layout, asked))
    return replace(found, joined_units=joined) if joined or size > 1 else None


def _once(key: tuple[Any, ...], work: Callable[[], T]) -> T:
    """What was found for a model is true of it in all layouts that this process tries."""
    if key not in _known:
        _known[key] = work()
    return cast(T, _known[key])


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


def _check_experts(source: Source) -> None:
    """Where rows say by their order which expert they are for, that is tried. Raises LayoutError."""
    twin = build_twin(source, miniature_config(source, Degrees(experts=2)), "eager", torch.device("cpu"))
    experts = [found for found in experts_modules(twin) if found.by_rows]
    reason = disagreement_over_experts(twin, experts) if experts else None
    if reason is not None:
        raise LayoutError(
            f"distributed.ep_size: {type(twin).__name__} is another model when ranks share out its experts ({reason}, tried on a "
            "small twin); write ep_size: 1"
        )


def _joined_units(source: Source) -> frozenset[str]:
    """The layers that must be on one pipeline stage with the layer before them. Raises LayoutError if no two can be apart."""
    reason = _fault_of_stages(source, Degrees(layers=2), frozenset())
    if reason is None:
        return frozenset()
    deep = Degrees(layers=_ALL_LAYERS)
    root, model = _build(source, miniature_config(source, deep))
    units = unit_names(model)
    joined = joined_blocks(root, model, units, one_row(model, _TOKENS))
    if len(joined) < len(units) - 1:
        reason = _fault_of_stages(source, deep, joined)
        if reason is None:
            return joined
    name = source.model_class.__name__
    raise LayoutError(f"distributed.pp_size: {name} cannot be cut into stages: {reason}; write pp_size: 1")


def _fault_of_stages(source: Source, degrees: Degrees, joined: frozenset[str]) -> str | None:
    config = miniature_config(source, degrees)

    def build() -> tuple[CausalLM, PreTrainedModel]:
        return _build(source, config)

    batch = one_row(build()[1], _TOKENS)
    return fault_of_stages(build, lambda model: unit_names(cast(PreTrainedModel, model)), next_token, batch, joined)


def _build(source: Source, config: PreTrainedConfig) -> tuple[CausalLM, PreTrainedModel]:
    twin = build_twin(source, config, "eager", torch.device("cpu")).train()
    return CausalLM(twin), twin


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
        if layout.size("tp") > 1 and (outside := [e.path for e in experts if not _is_summed(e.path, plan)]):
            raise LayoutError(
                f"distributed.ep_size: {layout.ep} with tp_size: {layout.size('tp')} needs experts in a part of the model that "
                f"tensor parallelism cuts, and {outside[0]} is in none; write tp_size: 1 or ep_size: 1"
            )
        plan = plan.sharing_out(experts)
    joined = found.joined_units if found is not None else frozenset()
    return replace(plan, balancing=balancing(model), joined_units=joined)


def _is_summed(path: str, plan: Plan) -> bool:
    """Whether tp ranks sum what a module puts out, as they must where each of them serves its share of the tokens."""
    return any(path == exit or path.startswith(f"{exit}.") for split in plan.splits for exit in split.exits)


def findings(source: Source, layout: Layout, asked: Mapping[str, str] | None = None) -> Findings:
    """How a model of `source` can be cut among the tp ranks of `layout`; `asked` is the recipe's `distributed.plan`.

    Raises LayoutError with what stands in the way.
    """
    size = layout.size("tp")
    twin = build_twin(source, miniature_config(source, Degrees(heads=size)), "eager", torch.device("cpu"))
    units = unit_names(twin)
    calls = Calls(twin, units)
    row = row_of_tokens(twin, _TOKENS)[None]
    flows = trace(twin, units, lambda: twin(input_ids=row, use_cache=False))
    size = _proof_size(twin, size)
    seen = calls.stop()
    found = find(twin, flows, asked_roles(twin, asked), size, BlockProof(twin, seen, size))
    found.sequences = sequences([(call.args, call.kwargs) for call in seen.values()], _TOKENS)
    tried = replace(layout, degrees={**layout.degrees, "tp": size})
    problem = disagreement(twin, lambda model: derive.declare(model, found, size), tried)
    if problem is not None:
        asked_for = "sequence_parallel: true" if layout.sequence_parallel else f"tp_size: {layout.size('tp')}"
        raise LayoutError(
            f"distributed.{asked_for} changes what {type(twin).__name__} computes ({problem}, tried on a small twin); write "
            + ("sequence_parallel: false" if layout.sequence_parallel else "tp_size: 1")
        )
    return found


def _proof_size(twin: PreTrainedModel, size: int) -> int:
    """As many ranks as asked for, or two where the twin has too few heads for so many."""
    counts = [n for module in twin.modules() if (n := head_count(module))]
    counts += [n for n in [getattr(twin.config.get_text_config(decoder=True), "num_attention_heads", None)] if n]
    return size if all(count % size == 0 for count in counts) else 2
