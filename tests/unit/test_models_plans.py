"""How each architecture is cut among tp ranks, found from its config's tables and its structure, and proved on a twin."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from meshtune.errors import LayoutError
from meshtune.layout import AXES, Group, Layout, Plan
from meshtune.layout.simulated import simulate
from meshtune.models import hf
from meshtune.models.plans.derive import Findings
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, causal_lm
from meshtune.parallel.tensor import parallelize
from meshtune.recipes.plans import declare, findings
from tests.unit.models_tiny import CONFIGS, tiny_model, tiny_source

Cuts = dict[str, tuple[int, tuple[int, ...]]]


def layout_of(size: int, sequence_parallel: bool = False) -> Layout:
    return Layout({axis: size if axis == "tp" else 1 for axis in AXES}, sequence_parallel=sequence_parallel)


_found: dict[tuple[Any, ...], Findings] = {}


def found_once(source: Source, layout: Layout) -> Findings:
    """`findings`, which takes longer than what is asked of it here: once for a model and a layout. Change nothing in it."""
    key = (
        source.model_class,
        source.config.to_json_string(use_diff=False),
        layout.size("tp"),
        layout.sequence_parallel,
    )
    if key not in _found:
        _found[key] = findings(source, layout, None)
    return _found[key]


def planned(
    source: Source, size: int = 2, asked: dict[str, str] | None = None
) -> tuple[PreTrainedModel, Plan, list[str]]:
    """The model on meta, its plan, and what is said of it."""
    layout = layout_of(size)
    found = findings(source, layout, asked) if asked else found_once(source, layout)
    model = hf.build(source, "eager")
    return model, declare(model, found, layout), found.notes()


def generic(name: str) -> str:
    """Without the number of its layer, and without the path of the layers."""
    return re.sub(r"^.*?\.(h|layers|layer)\.\d+\.", "", name)


def cuts_of(plan: Plan) -> Cuts:
    """Of blocks alone: dimension and blocks of each."""
    inside = tuple(f"{unit}." for unit in plan.units)
    return {generic(n): (cut.dim, cut.blocks) for n, cut in plan.cuts.items() if n.startswith(inside)}


def other(values: dict[str, Any], model_type: str) -> Source:
    """A source of an architecture that is in no list of ours."""
    model_class, config = causal_lm(AutoConfig.for_model(model_type, **values))
    return Source(ModelSection(name=model_type, weights="random"), model_type, config, model_class)


SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

QKV: Cuts = {"self_attn.q_proj.weight": (0, (48,)), "self_attn.k_proj.weight": (0, (24,))}
QKV |= {"self_attn.v_proj.weight": (0, (24,)), "self_attn.o_proj.weight": (1, (48,))}
QKV_BIAS: Cuts = {f"self_attn.{n}_proj.bias": (0, (48 if n == "q" else 24,)) for n in "qkv"}
MLP: Cuts = {"mlp.gate_proj.weight": (0, (40,)), "mlp.up_proj.weight": (0, (40,)), "mlp.down_proj.weight": (1, (40,))}

WANTED: dict[str, Cuts] = {
    "llama": {**QKV, **MLP},
    "qwen2-window": {**QKV, **QKV_BIAS, **MLP},
    "gemma3": {**QKV, **MLP},
    # Stacked projections, of which each rank has a part of each.
    "phi3": {
        "self_attn.qkv_proj.weight": (0, (48, 24, 24)),
        "self_attn.o_proj.weight": (1, (48,)),
        "mlp.gate_up_proj.weight": (0, (40, 40)),
        "mlp.down_proj.weight": (1, (40,)),
    },
    # Conv1D, whose weights are [in, out].
    "gpt2": {
        "attn.c_attn.weight": (1, (48, 48, 48)),
        "attn.c_attn.bias": (0, (48, 48, 48)),
        "attn.c_proj.weight": (0, (48,)),
        "mlp.c_fc.weight": (1, (192,)),
        "mlp.c_fc.bias": (0, (192,)),
        "mlp.c_proj.weight": (0, (192,)),
    },
    # Queries, keys and values head by head, and a bias of the scores (ALiBi).
    "bloom": {
        "self_attention.query_key_value.weight": (0, (144,)),
        "self_attention.query_key_value.bias": (0, (144,)),
        "self_attention.dense.weight": (1, (48,)),
        "mlp.dense_h_to_4h.weight": (0, (192,)),
        "mlp.dense_h_to_4h.bias": (0, (192,)),
        "mlp.dense_4h_to_h.weight": (1, (192,)),
    },
    # Experts, gate and up stacked.
    "mixtral": {**QKV, "mlp.experts.gate_up_proj": (-2, (40, 40)), "mlp.experts.down_proj": (-1, (40,))},
    # Experts stored transposed, gate and up interleaved, with biases, and a sink for each head.
    "gpt_oss": {
        **QKV,
        **QKV_BIAS,
        "self_attn.sinks": (0, (4,)),
        "mlp.experts.gate_up_proj": (-1, (80,)),
        "mlp.experts.gate_up_proj_bias": (-1, (80,)),
        "mlp.experts.down_proj": (-2, (40,)),
    },
    # Latent attention: what makes the latents stays whole. A dense first layer, and shared experts.
    "deepseek_v3": {
        "self_attn.q_b_proj.weight": (0, (64,)),
        "self_attn.kv_b_proj.weight": (0, (80,)),
        "self_attn.o_proj.weight": (1, (48,)),
        **MLP,
        **{f"mlp.shared_experts.{n}_proj.weight": (1 if n == "down" else 0, (16,)) for n in ("gate", "up", "down")},
        "mlp.experts.gate_up_proj": (-2, (16, 16)),
        "mlp.experts.down_proj": (-1, (16,)),
    },
    # No table, attention inside attention, and a feed-forward without a module of its own.
    "gpt_neo": {
        **{f"attn.attention.{n}_proj.weight": (0, (32,)) for n in "qkv"},
        "attn.attention.out_proj.weight": (1, (32,)),
        "mlp.c_fc.weight": (0, (128,)),
        "mlp.c_fc.bias": (0, (128,)),
        "mlp.c_proj.weight": (1, (128,)),
    },
    "opt": {
        **{f"self_attn.{n}_proj.{leaf}": (0, (48,)) for n in "qkv" for leaf in ("weight", "bias")},
        "self_attn.out_proj.weight": (1, (48,)),
        "fc1.weight": (0, (40,)),
        "fc1.bias": (0, (40,)),
        "fc2.weight": (1, (40,)),
    },
}
DIVIDED = {
    "gpt2": {"attn.c_proj.bias", "mlp.c_proj.bias"},
    "bloom": {"self_attention.dense.bias", "mlp.dense_4h_to_h.bias"},
    "gpt_oss": {"self_attn.o_proj.bias", "mlp.experts.down_proj_bias"},
    "gpt_neo": {"attn.attention.out_proj.bias", "mlp.c_proj.bias"},
    "opt": {"self_attn.out_proj.bias", "fc2.bias"},
}
SHARED = {
    "gemma3": {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
    "mixtral": {"mlp.gate.weight"},
    "gpt_oss": {"mlp.router.weight", "mlp.router.bias"},
    "deepseek_v3": {"mlp.gate.weight"}
    | {f"self_attn.{n}.weight" for n in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")},
}


@pytest.mark.parametrize("name", WANTED)
def test_what_is_cut_what_counts_once_and_what_stays_whole(name: str) -> None:
    """Every parameter of a block that is not named here is outside the splits and has its gradient on every rank."""
    model, plan, notes = planned(tiny_source(name))
    assert cuts_of(plan) == WANTED[name] and not notes
    assert {generic(n) for n in plan.divided} == DIVIDED.get(name, set())
    assert {generic(n) for n in plan.shared - plan.divided} == SHARED.get(name, set())
    assert bool(plan.head_inputs) == (name == "bloom")
    # A rule for each of the model's own parameters, and none for what it has not.
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert plan.cuts.keys() | plan.shared <= names and not plan.cuts.keys() & plan.shared
    assert [plan.cuts[f"{path}.weight"].blocks for path in plan.vocabulary] == [(97,), (97,)]
    assert len(plan.splits) == 2 * len(plan.units)


# What is no projection of heads or features: routers, and the gate of a shared expert.
WHOLE = {"qwen2_moe": {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}, "qwen3_moe": {"mlp.gate.weight"}}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - WANTED.keys() - {"mamba", "llama-odd"}))
def test_every_matrix_of_a_block_is_cut(name: str) -> None:
    model, plan, notes = planned(tiny_source(name))
    inside = tuple(f"{unit}." for unit in plan.units)
    matrices = {n for n, p in model.named_parameters() if n.startswith(inside) and p.ndim > 1}
    assert {generic(n) for n in matrices - plan.cuts.keys()} == WHOLE.get(name, set()) and not notes
    assert len(plan.vocabulary) == 2


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt_oss"])
def test_ranks_hold_what_the_plan_says_and_together_the_whole(name: str) -> None:
    model, plan, _ = planned(tiny_source(name))
    owns = [hf.build(tiny_source(name), "eager") for _ in range(2)]

    def local(layout: Layout) -> dict[str, torch.Size]:
        own = owns[layout.rank("tp")]
        parallelize(own, plan, layout)
        return {n: p.shape for n, p in own.named_parameters()}

    first, second = simulate(layout_of(2), local)
    for path, parameter in model.named_parameters():
        numbers = first[path].numel() + second[path].numel()
        assert numbers == parameter.numel() * (1 if path in plan.cuts else 2), path


def test_fewer_key_value_heads_than_ranks_are_computed_whole_and_shared() -> None:
    _, plan, _ = planned(tiny_source("llama", num_key_value_heads=1))
    assert {generic(name) for name in plan.selected} == {"self_attn.k_proj", "self_attn.v_proj"}
    assert {generic(name) for name in plan.shared} == {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}
    assert "self_attn.q_proj.weight" in cuts_of(plan) and "self_attn.k_proj.weight" not in cuts_of(plan)


def test_key_value_heads_that_ranks_can_neither_share_nor_split_are_refused() -> None:
    source = tiny_source("llama", num_attention_heads=12, num_key_value_heads=3, head_dim=4)
    with pytest.raises(LayoutError, match="3 key-value heads cannot be shared out among 2 tp ranks"):
        planned(source)


def test_normalisations_over_all_heads_see_all_heads() -> None:
    """Queries and keys are normalised over their whole width, which no rank has."""
    _, plan, _ = planned(other({**SIZES, **HEADS, "head_dim": 12}, "olmo2"))
    assert {generic(name) for name in plan.gathered} == {"self_attn.q_norm", "self_attn.k_norm"}
    assert {generic(name) for name in plan.shared} == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@pytest.mark.parametrize("grouped", [False, True])
def test_fused_queries_and_keys_of_other_counts(grouped: bool) -> None:
    """One key head behind all queries is computed whole; groups of queries with their own key head are cut group by group."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    counts = {"new_decoder_architecture": True, "num_kv_heads": 2} if grouped else {"multi_query": True}
    _, plan, notes = planned(other({**sizes, **counts}, "falcon"))
    fused = "self_attention.query_key_value"
    selected = {generic(name): groups for name, groups in plan.selected.items()}
    if grouped:
        assert cuts_of(plan)[f"{fused}.weight"] == (0, (96,)) and not selected
    else:
        assert selected == {fused: (Group(0, 48, 4), Group(48, 12, 1), Group(60, 12, 1))}
        assert f"{fused}.weight" in {generic(name) for name in plan.shared}
    assert not notes and cuts_of(plan)["self_attention.dense.weight"] == (1, (48,))


def test_a_model_without_layers_to_cut_is_refused_by_name() -> None:
    """C58: no ranks that silently compute copies."""
    with pytest.raises(LayoutError) as refusal:
        planned(tiny_source("mamba"))
    assert "distributed.tp_size: no layer of MambaForCausalLM can be cut" in str(refusal.value)
    assert "write tp_size: 1, or say in distributed.plan" in str(refusal.value)


def test_heads_that_cannot_be_shared_out_are_refused_with_numbers() -> None:
    with pytest.raises(LayoutError, match="its 3 attention heads cannot be shared out among 2 tp ranks"):
        planned(tiny_source("llama-odd"))


def test_a_width_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="inner width 1 cannot be shared out among 2 tp ranks"):
        planned(tiny_source("llama", intermediate_size=1))


# --- distributed.plan


def test_replicate_keeps_a_module_whole() -> None:
    _, plan, _ = planned(tiny_source("llama"), asked={"model.layers.*.mlp": "replicate"})
    assert cuts_of(plan) == QKV
    assert len(plan.splits) == len(plan.units)


def test_a_recipes_plan_can_say_what_the_structure_says() -> None:
    asked = {f"transformer.h.*.mlp.{name}": style for name, style in (("c_fc", "colwise"), ("c_proj", "rowwise"))}
    _, plan, _ = planned(tiny_source("gpt_neo"), asked=asked)
    assert cuts_of(plan) == WANTED["gpt_neo"]


def test_a_role_that_a_layer_cannot_have_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"distributed.plan: model.layers.\*.self_attn.o_proj cannot be colwise"):
        planned(tiny_source("llama"), asked={"model.layers.*.self_attn.o_proj": "colwise"})


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.layers.*.mlp.gate_prj", "did you mean 'model.layers.*.mlp.gate_proj'?"),
        ("model.layers.7.mlp.gate_proj", "write * in the place of a layer's number"),
        ("completely.other", "its modules are"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error_with_the_nearest_name(pattern: str, hint: str) -> None:
    with pytest.raises(LayoutError) as error:
        planned(tiny_source("llama"), asked={pattern: "colwise"})
    assert f"distributed.plan: {pattern!r} names no module of LlamaForCausalLM" in str(error.value)
    assert hint in str(error.value)


# Their masks are made of the part of a row that reaches the first block.
ENCODERS = {"bert", "electra"}


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_what_cannot_have_its_sequence_cut_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="sequence_parallel: true changes what"):
        findings(tiny_source(name), layout_of(2, sequence_parallel=True), None)


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and a mask by which the first row ends early."""
    ids = torch.randint(4, 90, (rows, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return ids, mask


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"mamba", "llama-odd", "hrm_text"} - ENCODERS))
def test_evaluation_is_that_of_the_whole_model(name: str, sequence_parallel: bool) -> None:
    """Without gradients, residuals that enter a cut module (Bloom) are still added once. One row, and as many as there are
    heads: a mask [rows, 1, ...] is not taken for scores by head [rows * heads, ...]."""
    source = tiny_source(name)
    layout = layout_of(2, sequence_parallel)
    model = hf.build(source, "eager")
    plan = declare(model, found_once(source, layout), layout)
    whole = tiny_model(name).eval()
    owns = [copy.deepcopy(whole) for _ in range(2)]

    def hidden_states(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state[mask.bool()]
                for ids, mask in (batch_of(1), batch_of(4))
            ]

    def local(layout: Layout) -> list[torch.Tensor]:
        own = owns[layout.rank("tp")]
        parallelize(own, plan, layout)
        return hidden_states(own)

    wanted = hidden_states(whole)
    for found in simulate(layout, local):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
