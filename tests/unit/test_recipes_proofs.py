"""A plan that is wrong is found on a twin before any weight is read: each of these is right but for one rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from meshtune.errors import LayoutError
from meshtune.layout import Plan, Split
from meshtune.layout.pieces import Cut
from meshtune.models.blocks import unit_names
from meshtune.models.plans import derive, geometry
from meshtune.models.plans.derive import Findings
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, row_of_tokens
from meshtune.recipes.block_proof import BlockProof, Calls
from meshtune.recipes.model_proof import disagreement
from meshtune.recipes.plans import declare, findings
from tests.unit.models_tiny import tiny_source
from tests.unit.test_models_plans import HEADS, SIZES, found_once, generic, layout_of, other

Break = Callable[[Plan], Plan]


def olmo2() -> Source:
    return other({**SIZES, **HEADS, "head_dim": 12}, "olmo2")


def without(*names: str) -> Callable[[str], bool]:
    return lambda path: generic(path) not in names


def uncut(*names: str) -> Break:
    """The parameters stay whole."""
    keep = without(*names)
    return lambda plan: replace(plan, cuts={n: cut for n, cut in plan.cuts.items() if keep(n)})


def recut(**changes: Any) -> Callable[[str], Break]:
    return lambda name: (
        lambda plan: replace(
            plan, cuts={n: replace(cut, **changes) if generic(n) == name else cut for n, cut in plan.cuts.items()}
        )
    )


def swapped(column: str, row: str) -> Break:
    """The two layers in each other's role."""

    def change(plan: Plan) -> Plan:
        turned = {n: replace(cut, dim=1 - cut.dim) for n, cut in plan.cuts.items() if generic(n) in (column, row)}
        return replace(plan, cuts={**plan.cuts, **turned})

    return change


def dropping(field: str) -> Break:
    return lambda plan: replace(plan, **{field: type(getattr(plan, field))()})


def ends_early(plan: Plan) -> Plan:
    """The sum over ranks is taken inside, before the layer that is cut by its inputs."""
    return replace(
        plan, splits=tuple(Split(s.entries, tuple(f"{path}.q_proj" for path in s.exits)) for s in plan.splits)
    )


# Model, part of the block that is broken, how, and what the proof says.
BROKEN: dict[str, tuple[Source | Callable[[], Source], str, Break, str]] = {
    "a swapped role": (
        tiny_source("llama"),
        "mlp",
        swapped("mlp.up_proj.weight", "mlp.down_proj.weight"),
        "does not run",
    ),
    "swapped roles of square layers": (
        tiny_source("llama", num_key_value_heads=4),
        "self_attn",
        swapped("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        "",
    ),
    "a column left whole": (tiny_source("llama"), "mlp", uncut("mlp.up_proj.weight"), "does not run"),
    "stacked projections cut as one": (
        tiny_source("phi3"),
        "mlp",
        recut(blocks=(80,))("mlp.gate_up_proj.weight"),
        "output differs",
    ),
    "queries, keys and values cut as one": (
        tiny_source("gpt2"),
        "attn",
        lambda plan: recut(blocks=(144,))("attn.c_attn.bias")(recut(blocks=(144,))("attn.c_attn.weight")(plan)),
        "output differs",
    ),
    "a norm over all heads that is not gathered": (olmo2, "self_attn", dropping("gathered"), ""),
    "a bias counted on every rank": (tiny_source("gpt2"), "mlp", dropping("divided"), "output differs"),
    "a norm inside whose gradient is not summed": (
        tiny_source("qwen3"),
        "self_attn",
        dropping("shared"),
        "the gradient of self_attn",
    ),
    "a router whose gradient is not summed": (
        tiny_source("mixtral"),
        "mlp",
        dropping("shared"),
        "the gradient of mlp.gate.weight",
    ),
    "counts of heads that are not local": (tiny_source("gpt_neo"), "attn", dropping("attributes"), ""),
    "key heads of another rank": (
        tiny_source("llama"),
        "self_attn",
        lambda plan: replace(
            plan,
            cuts={
                n: Cut("tp", 0, (12, 12)) if generic(n) == "self_attn.k_proj.weight" else cut
                for n, cut in plan.cuts.items()
            },
        ),
        "output differs",
    ),
    "score biases of all heads": (tiny_source("bloom"), "self_attention", dropping("head_inputs"), ""),
    "outputs that are not summed": (tiny_source("llama"), "mlp", dropping("splits"), "output differs"),
    "a split that ends early": (tiny_source("llama"), "self_attn", ends_early, ""),
    "inputs whose gradients are not summed": (
        tiny_source("llama"),
        "mlp",
        lambda plan: replace(plan, splits=tuple(Split((), s.exits) for s in plan.splits)),
        "the gradient of",
    ),
}


def region_plans(source: Source) -> tuple[PreTrainedModel, str, BlockProof, dict[str, Plan]]:
    """A twin, its last block, the proof, and the right plan of each of the block's regions."""
    twin = build_twin(source, source.config, "eager", torch.device("cpu"))
    unit = unit_names(twin)[-1]
    calls = Calls(twin, [unit])
    row = row_of_tokens(twin, 12)[None]
    twin(input_ids=row, use_cache=False)
    proof = BlockProof(twin, calls.stop(), 2)
    found = found_once(source, layout_of(2))
    block = twin.get_submodule(unit)
    regions = found.regions[derive.signature_of(block)]
    plans = {region.path: geometry.realise(region, block, twin.config, choice, 2) for region, choice in regions}
    return twin, unit, proof, plans


@pytest.mark.parametrize("name", BROKEN)
def test_a_block_cut_by_a_broken_plan_is_found_out(name: str) -> None:
    source, path, change, says = BROKEN[name]
    _, unit, proof, plans = region_plans(source() if callable(source) else source)
    assert proof(unit, plans[path]) is None
    broken = change(plans[path])
    assert broken != plans[path]
    reason = proof(unit, broken)
    assert reason is not None and says in reason, reason


def test_a_vocabulary_whose_head_stays_whole_is_found_out() -> None:
    """Blocks do not show it: the model is trained whole and cut."""
    source = tiny_source("llama")
    layout = layout_of(2)
    found = found_once(source, layout)
    twin = build_twin(source, source.config, "eager", torch.device("cpu"))
    assert disagreement(twin, lambda model: declare(model, found, layout), layout) is None

    def broken(model: PreTrainedModel) -> Plan:
        plan = declare(model, found, layout)
        return replace(plan, cuts={**plan.cuts, "lm_head.weight": Cut("tp", 1, (48,))})

    assert disagreement(twin, broken, layout) is not None


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_shared_parameter_forgotten_in_the_model_is_found_out(sequence_parallel: bool) -> None:
    """C51: under sequence parallelism all of a block is shared, and that follows from no rule that could be forgotten."""
    source = tiny_source("qwen3")
    layout = layout_of(2, sequence_parallel)
    found = found_once(source, layout)
    twin = build_twin(source, source.config, "eager", torch.device("cpu"))

    def broken(model: PreTrainedModel) -> Plan:
        return replace(declare(model, found, layout), shared=frozenset())

    reason = disagreement(twin, broken, layout)
    assert (reason is None) == sequence_parallel
    if reason is not None:
        assert "_norm.weight differs" in reason


def test_a_recipe_is_refused_where_every_way_to_cut_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the proof's own reason; nothing is cut on trust."""
    realise = geometry.realise
    monkeypatch.setattr(derive, "realise", lambda *given: dropping("attributes")(dropping("splits")(realise(*given))))
    with pytest.raises(LayoutError, match=r"no layer of LlamaForCausalLM can be cut .*cut, its output differs by"):
        findings(tiny_source("llama"), layout_of(2))


def test_a_model_that_is_wrong_only_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = derive.declare

    def wrong(model: PreTrainedModel, found: Findings, size: int) -> Plan:
        plan = right(model, found, size)
        return replace(plan, splits=plan.splits[:-1])

    monkeypatch.setattr(derive, "declare", wrong)
    with pytest.raises(
        LayoutError, match=r"distributed.tp_size: 2 changes what LlamaForCausalLM computes .*write tp_size: 1"
    ):
        findings(tiny_source("llama"), layout_of(2))
