"""A model cut into pipeline stages: run one after another, they are the whole model, in value and in every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.data.batch import Batch
from meshtune.errors import LayoutError, ModelError
from meshtune.models.blocks import unit_names
from meshtune.models.causal_lm import CausalLM
from meshtune.parallel.stage_trial import fault_of_stages, in_turn, pipeline_ranks
from meshtune.parallel.stages import STAGES_PER_RANK, Stages, cut
from meshtune.parallel.stand_ins import is_absent
from tests.unit.models_tiny import CONFIGS, tiny_model

IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(3))
BATCH = Batch(input_ids=IDS, position_ids=torch.arange(9).expand(2, 9), shift_labels=IDS.roll(-1, 1))
# Runs each of its layers several times.
REPEATS = {"hrm_text"}


def objective(model: CausalLM, batch: Batch) -> tuple[Tensor]:
    logits = model.head(model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask).flatten(0, 1))
    return (nn.functional.cross_entropy(logits.float(), batch.shift_labels.flatten(), reduction="sum"),)


def cut_up(model: Any, ranks: int, schedule: str = "1f1b") -> list[tuple[CausalLM, Stages]]:
    """Every rank's root and stages, each of a copy of the model."""
    found = []
    for layout in pipeline_ranks(ranks):
        own = copy.deepcopy(model)
        root = CausalLM(own)
        found.append((root, cut(root, own, unit_names(own), layout, schedule)))
    return found


def gradients(parts: list[tuple[CausalLM, Stages]], whole: Any) -> dict[str, Tensor | None]:
    """By the names of the whole model; of a parameter that several ranks hold, the sum."""
    found: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in whole.named_parameters())
    for root, stages in parts:
        for name, parameter in root.model.named_parameters():
            canonical = stages.placement.canonical[name]
            if parameter.grad is not None:
                found[canonical] = parameter.grad if found[canonical] is None else found[canonical] + parameter.grad
    return found


def check_equal(model: Any, ranks: int, schedule: str = "1f1b") -> list[tuple[CausalLM, Stages]]:
    parts = cut_up(model, ranks, schedule)
    found = in_turn(parts, objective, BATCH)
    (wanted,) = CausalLM(model)(objective, BATCH)
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)
    grads = gradients(parts, model)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert grads[name] is None or not grads[name].any(), name
        else:
            scale = max(parameter.grad.abs().max().item(), 1.0)
            assert grads[name] is not None, name
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)
    return parts


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REPEATS])
def test_two_stages_are_the_whole_model(name: str) -> None:
    """Tied or not, blocks that return tuples, learnt positions, windows, experts, layers between trunk and head."""
    for root, stages in check_equal(tiny_model(name), 2):
        assert len(stages.blocks) == 1
        held = {name for name, _ in root.model.named_parameters(remove_duplicate=False)}
        assert held == {name for name in stages.placement.holders if stages.holds(name)}


@pytest.mark.parametrize(
    ("layers", "ranks", "schedule"),
    [(3, 2, "1f1b"), (5, 3, "gpipe"), (5, 2, "interleaved_1f1b"), (7, 3, "interleaved_zero_bubble")],
)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "deepseek_v3"])
def test_every_block_is_on_one_stage_in_order(name: str, layers: int, ranks: int, schedule: str) -> None:
    model = tiny_model(name, num_hidden_layers=layers)
    parts = check_equal(model, ranks, schedule)
    by_stage = sorted((stage.index, stage.blocks) for _, stages in parts for stage in stages.local)
    assert [index for index, _ in by_stage] == list(range(ranks * STAGES_PER_RANK[schedule]))
    assert [name for _, names in by_stage for name in names] == [f"model.layers.{i}" for i in range(layers)]
    assert all(names for _, names in by_stage)


def test_a_tied_weight_is_on_the_first_and_the_last_stage_and_counts_once() -> None:
    parts = cut_up(tiny_model("llama-tied", num_hidden_layers=3), 3)
    first, middle, last = parts
    assert [shared.ranks for _, stages in (first, last) for shared in stages.shared] == [(0, 2), (0, 2)]
    assert [first[1].shared[0].name, last[1].shared[0].name] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert not middle[1].shared
    assert first[1].counts("model.embed_tokens.weight") and not last[1].counts("lm_head.weight")
    assert is_absent(last[0].model.model.embed_tokens) and is_absent(first[0].model.lm_head)
    for root, stages in parts:
        root.model.tie_weights()  # as loading does; there is nothing to tie on these stages
        assert not any(p.is_meta for p in root.model.parameters())
        assert all(stages.counts(n) for n, _ in root.model.named_parameters() if n not in {"lm_head.weight"})


def test_no_stage_holds_what_it_does_not_run() -> None:
    parts = cut_up(tiny_model("gpt2", n_layer=3), 3)
    names = [{name for name, _ in root.model.named_parameters(remove_duplicate=False)} for root, _ in parts]
    assert [{n.split(".")[1] for n in held if ".h." not in n} for held in names] == [
        {"wte", "wpe"},
        set(),
        {"weight", "ln_f"},
    ]
    blocks = [{int(n.split(".")[2]) for n in held if ".h." in n} for held in names]
    assert blocks == [{0}, {1}, {2}]


def test_embedding_and_head_are_counted() -> None:
    """Of 8 layers on 2 stages, with a vocabulary as large as several layers and both its matrices, each has half."""
    model = tiny_model("llama", num_hidden_layers=8, vocab_size=2000)
    assert [len(stages.blocks) for _, stages in cut_up(model, 2)] == [4, 4]
    tied = tiny_model("gemma3", num_hidden_layers=9, layer_types=["full_attention"] * 9, vocab_size=500)
    assert [len(stages.blocks) for _, stages in cut_up(tied, 3)][1] > 3


def test_what_cannot_be_cut_is_refused_with_numbers() -> None:
    with pytest.raises(
        LayoutError, match="3 ranks are 3 stages, but the model has 2 layers to cut; write pp_size: 2 or less"
    ):
        cut_up(tiny_model("llama"), 3)
    with pytest.raises(
        LayoutError, match=r"4 stages, but the model has 2 layers to cut; write pp_size: 1, or pp_schedule: 1f1b"
    ):
        cut_up(tiny_model("llama"), 2, "interleaved_1f1b")
    with pytest.raises(ModelError, match="more than once in a forward"):
        cut_up(tiny_model("hrm_text"), 2)


class _Leaking(nn.Module):
    """A layer that adds what the first of its kind was given: a second stream beside the hidden states."""

    def __init__(self, layer: nn.Module, memory: dict[str, Tensor]):
        super().__init__()
        self.layer, self.memory = layer, memory

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.layer.self_attn.layer_idx == 0:
            self.memory["first"] = hidden_states
        return self.layer(hidden_states, **kwargs) + 0.5 * self.memory["first"]


def _leaking() -> tuple[CausalLM, Any]:
    model, memory = tiny_model("llama", num_hidden_layers=3), {}
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = _Leaking(layer, memory)
    return CausalLM(model), model


def _sound() -> tuple[CausalLM, Any]:
    model = tiny_model("gemma3", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    return CausalLM(model), model


def _names(model: Any) -> list[str]:
    return [f"model.layers.{index}" for index in range(len(model.model.layers))]


def test_layers_that_need_more_than_hidden_states_are_found_out() -> None:
    assert fault_of_stages(_sound, _names, objective, BATCH) is None
    fault = fault_of_stages(_leaking, _names, objective, BATCH)
    assert fault is not None and "layers need more than hidden states of the layers before them (KeyError" in fault


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "gpt_oss"])
def test_on_the_meta_device_modules_have_the_same_places(name: str) -> None:
    """As a model is cut in training: code that asks tensors for values must not hide what feeds what."""
    (_, wanted), _ = cut_up(tiny_model(name), 2)
    meta = tiny_model(name).to("meta")
    meta.tie_weights()
    (_, found), _ = cut_up(meta, 2)
    assert found.placement == wanted.placement
    assert set(found.placement.outer.values()) == {(0,), (1,)} | {
        at for at in wanted.placement.outer.values() if len(at) > 1
    }
