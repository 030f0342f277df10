"""`peft:` from its keys to the plan: what is checked before a weight is read, and where each part of an adapter lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshtune.config import from_mapping
from meshtune.errors import CheckpointError, ModelError, RecipeError
from meshtune.layout import Plan
from meshtune.layout.pieces import Cut
from meshtune.models import fingerprint
from meshtune.models.adapters.inject import config_of, inject
from meshtune.models.adapters.rows import adapted
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.adapters.targets import Facts, find_targets
from meshtune.models.source import Source
from meshtune.observe import training_flops_per_token
from meshtune.recipes import adapting
from meshtune.recipes.arithmetic import sizes
from meshtune.recipes.explaining import explained
from meshtune.recipes.recipe import Recipe
from tests.unit.models_tiny import save_tiny, saved_source, tiny_source
from tests.unit.test_adapters_targets import bare


def tiny_folder(architecture: str, folder: Path, dtype: torch.dtype = torch.float32) -> Source:
    return saved_source(save_tiny(architecture, folder / "model", dtype))


def recipe(name: Any = "x/y", **sections: Any) -> Recipe:
    needed = {"data": {"train_path": "rows.jsonl"}, "training": {"learning_rate": 1e-4}}
    return from_mapping(Recipe, {"model": {"name": str(name)}, **needed, **sections})


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"lora_alpha": 16}, "peft.lora_alpha: found an unknown key; write `alpha`"),
        ({"lora_r": 16}, "write `r`"),
        ({"rslora": True}, "write `use_rslora`"),
        ({"adapter": "a", "r": 8}, "peft.r: is what a says; leave it out beside peft.adapter"),
        ({"rank_pattern": {"q_proj": 0}}, "peft.rank_pattern: q_proj: found 0; wanted a number above 0"),
        ({"loraplus_lr_embedding": 1e-6}, "has no effect without loraplus_lr_ratio"),
        ({"target_parameters": ["a"], "use_dora": True}, "peft.use_dora: is not defined for experts' stacked weights"),
        ({"target_parameters": ["a"], "dropout": 0.1}, "peft.dropout: is not defined for experts' stacked weights"),
        ({"init_lora_weights": "eva"}, 'peft.init_lora_weights: found "eva"'),
        ({"dropout": 1.0}, "peft.dropout: found 1.0"),
    ],
)
def test_keys_that_cannot_be_meant(peft: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(peft=peft)
    assert message in str(error.value)


def test_an_adapter_trains_alone() -> None:
    with pytest.raises(RecipeError, match=r"model.freeze: has no effect beside peft"):
        recipe(peft={}, model={"name": "x/y", "freeze": ["embed_tokens"]})
    with pytest.raises(RecipeError, match=r"distributed\.strategy: megatron_fsdp does not hold frozen weights"):
        recipe(peft={}, distributed={"strategy": "megatron_fsdp"})


def test_a_ratio_of_no_rate_is_none() -> None:
    """C44: the rate of embeddings is one of its own, which a share of 0 cannot be."""
    nothing = {"learning_rate": 0.0}
    recipe(peft={}, training=nothing)
    with pytest.raises(RecipeError, match=r"peft.loraplus_lr_ratio: has no effect with training.learning_rate: 0"):
        recipe(peft={"loraplus_lr_ratio": 4.0}, training=nothing)


def test_frozen_bfloat16_is_computed_with_in_float32_where_it_is_widened() -> None:
    sections = {"model": {"name": "x/y", "dtype": "bfloat16"}, "training": {"learning_rate": 1e-4, "precision": "fp32"}}
    assert recipe(peft={}, **sections).model.dtype == "bfloat16"
    for others in ({}, {"peft": {}, "distributed": {"strategy": "ddp"}}):
        with pytest.raises(RecipeError, match="fp32 cannot be computed with weights held in bfloat16"):
            recipe(**sections, **others)


def test_tokens_are_named_by_id_or_text() -> None:
    source, model = tiny_source("llama"), bare("llama")
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"<a>": 3, "<far>": rows}

    def ids(*asked: int | str) -> list[int]:
        return adapting._token_ids(list(asked), source, Words(), model)  # type: ignore[arg-type]

    assert ids(7, "<a>") == [7, 3]
    for wrong, message in (
        ("<b>", "is no token of the tokenizer"),
        ("<far>", "has no row in the embedding"),
        (-1, "no row"),
    ):
        with pytest.raises(RecipeError, match=message):
            ids(wrong)
    with pytest.raises(RecipeError, match="named twice"):
        ids(3, "<a>")


def rows_of(architecture: str, plan: Plan, **settings: Any) -> Plan:
    model, section = bare(architecture), AdapterSection(r=2, **settings)
    inject(model, section, config_of(section, find_targets(section, model, Facts()), model))
    return adapted(plan, model)


def test_rows_follow_those_of_the_layer() -> None:
    """Column-wise: B as the outputs; row-wise: A as the inputs; what is whole in a split has a part of its gradient."""
    q, k, o = (f"model.layers.0.self_attn.{name}_proj" for name in "qko")
    plan = Plan(
        cuts={
            f"{q}.weight": Cut("tp", 0, (8, 4), 2),
            f"{q}.bias": Cut("tp", 0, (12,)),
            f"{o}.weight": Cut("tp", -1, (16,)),
        },
        shared=frozenset({f"{k}.weight"}),
        divided=frozenset({f"{o}.bias"}),
    )
    found = rows_of("llama", plan, target_modules=["q_proj", "k_proj", "o_proj", "down_proj"])
    assert found.cuts == {
        f"{q}.base_layer.weight": Cut("tp", 0, (8, 4), 2),
        f"{q}.base_layer.bias": Cut("tp", 0, (12,)),
        f"{q}.lora_B.default.weight": Cut("tp", 0, (8, 4), 2),
        f"{o}.base_layer.weight": Cut("tp", -1, (16,)),
        f"{o}.lora_A.default.weight": Cut("tp", 1, (16,)),
    }
    assert found.divided == {f"{o}.base_layer.bias"}
    assert found.shared == {
        f"{k}.base_layer.weight",
        f"{k}.lora_A.default.weight",
        f"{k}.lora_B.default.weight",
        f"{q}.lora_A.default.weight",
        f"{o}.lora_B.default.weight",
    }


def test_rows_of_a_transposed_layer_and_of_experts() -> None:
    layer = "transformer.h.0.attn.c_attn"
    found = rows_of("gpt2", Plan(cuts={f"{layer}.weight": Cut("tp", 1, (4, 4, 4))}), target_modules=["c_attn"])
    assert found.cuts[f"{layer}.lora_B.default.weight"] == Cut("tp", 0, (4, 4, 4))
    experts = "model.layers.0.mlp.experts"
    cuts = {f"{experts}.gate_up_proj": Cut("tp", -2, (6, 6)), f"{experts}.down_proj": Cut("tp", -1, (6,))}
    found = rows_of("qwen3_moe", Plan(cuts=cuts), target_parameters=["all-experts"])
    assert found.cuts[f"{experts}.base_layer.lora_B.default.weight"] == Cut("tp", 0, (6, 6))
    assert found.cuts[f"{experts}.lora_A.default.weight"] == Cut("tp", 1, (6,))
    assert f"{experts}.base_layer.lora_A.default.weight" in found.shared


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"use_dora": True}, "use_dora"), ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa")],
)
def test_a_head_that_takes_trained_tokens_from_the_embedding_has_plain_lora_alone(
    settings: dict[str, Any], key: str
) -> None:
    """Both need the head's weight itself, in the place of which PEFT has a layer of those tokens."""
    model = bare("llama-tied")
    section = AdapterSection(target_modules=["lm_head"], trainable_token_indices=[5], **settings)
    config = config_of(section, find_targets(section, model, Facts()), model, [5])
    with pytest.raises(ModelError, match=rf"peft\.{key} .*lm_head, .*trainable_token_indices"):
        inject(model, section, config)


def test_explain_shows_where_an_adapter_lies(tmp_path: Path) -> None:
    model = save_tiny("qwen3_moe", tmp_path)
    asked = {"r": 2, "target_modules": ["q_proj", "o_proj"], "target_parameters": ["all-experts"]}
    sections = {"distributed": {"tp_size": 2, "ep_size": 2, "sequence_parallel": True}, "peft": asked}
    found = explained(recipe(model, **sections), 2)
    placed = {one.name.removeprefix("model.layers.0."): one for one in found.parameters}
    assert placed["self_attn.q_proj.lora_A.default.weight"].placement["tp"] == "Replicate"
    assert "sum over tp 2" in placed["self_attn.q_proj.lora_A.default.weight"].reduction
    assert placed["self_attn.q_proj.lora_B.default.weight"].placement["tp"].startswith("Shard(0)")
    assert placed["self_attn.o_proj.lora_A.default.weight"].placement["tp"].startswith("Shard(1)")
    first, second = placed["mlp.experts.lora_A.default.weight"], placed["mlp.experts.lora_B.default.weight"]
    assert (first.placement["ep"], second.placement["ep"]) == ("Shard(0), 4 experts", "Shard(1), 4 experts")
    assert first.local_shape[0] * 2 == first.shape[0]
    assert second.local_shape[1] * 2 == second.shape[1]
    assert any("LoRA of rank 2" in line for line in found.notes)


def test_frozen_weights_keep_the_dtype_of_their_checkpoint(tmp_path: Path) -> None:
    source = tiny_folder("llama", tmp_path, torch.bfloat16)
    float32, bfloat16 = torch.float32, torch.bfloat16
    for sections, compute, held in (
        ({}, float32, bfloat16),
        ({"distributed": {"strategy": "ddp"}}, bfloat16, bfloat16),
        ({"distributed": {"strategy": "ddp"}}, float32, float32),  # which does not widen weights where they are used
    ):
        assert adapting.held(source, recipe(peft={}, **sections), compute).master_dtype == held
    assert adapting.held(source, recipe(), float32).master_dtype == float32


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    source = tiny_folder("llama", tmp_path)
    before = fingerprint.of_files(source)
    with open(source.files[0], "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert fingerprint.of_files(source) != before
    one, two = {"a": torch.zeros(10_000)}, {"a": torch.zeros(10_000)}
    assert fingerprint.of_tensors(one) == fingerprint.of_tensors(two)
    two["a"] += 1
    assert fingerprint.of_tensors(one) != fingerprint.of_tensors(two)


def test_frozen_weights_cost_no_gradient() -> None:
    """Of six operations for each weight and token, two are its gradient."""
    assert training_flops_per_token(100, 0, 0, 0, 10, 0.5, 100, 10) == 4 * 100 + 0.5 * 4 * 10
    model = bare("llama")
    whole = sizes(model)
    section = AdapterSection(r=2)
    adapter = inject(model, section, config_of(section, find_targets(section, model, Facts()), model))
    trained = adapting.trained(model, recipe().model)
    assert trained is not None
    assert trained.names == adapter.trained
    found = adapting.sizes_of(model, whole, trained)
    assert (found.body, found.frozen_body) == (whole.body + trained.elements, whole.body)
    assert (found.head, found.frozen_head) == (whole.head, whole.head)


def test_an_adapter_of_other_weights_is_not_gone_on_with(tmp_path: Path) -> None:
    from meshtune.checkpoint.folder import Complete

    source, asked = tiny_folder("llama", tmp_path), recipe(peft={})
    found = adapting.base_of(asked, source, None, None)
    assert found is not None
    complete = Complete(tmp_path, 3, {"base": found})
    assert adapting.base_of(asked, source, None, complete) == found
    with pytest.raises(CheckpointError, match="holds an adapter beside other weights"):
        adapting.base_of(asked, source, {"a": torch.ones(3)}, complete)
    assert adapting.base_of(recipe(), source, None, None) is None
