"""Random weights are those of transformers in kind, and follow from seed and names alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from meshtune.errors import ModelError
from meshtune.models import hf
from meshtune.models.initialize import fill, initialize
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, causal_lm
from tests.unit.models_tiny import CONFIGS, tiny_config

CPU = torch.device("cpu")
LIKE = ["llama-odd", "gemma3", "cohere2", "mixtral", "deepseek_v3", "gpt_oss", "gpt2", "opt", "bert", "mamba"]
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "constructor sets two scalars": ("apertus", {}),
    "constructor sets every matrix": ("openai-gpt", {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "a parent's rule sets its child": ("modernbert-decoder", {"num_attention_heads": 4, "pad_token_id": 3}),
    "a tower with rules of its own": (
        "gemma3",
        {
            "text_config": {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 40, "vocab_size": 97},
            "vision_config": {
                "hidden_size": 48,
                "num_hidden_layers": 1,
                "intermediate_size": 40,
                "num_attention_heads": 4,
            }
            | {"image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
}
_SMALL = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 97}


def _source(name: str, **changes: Any) -> Source:
    if name in CONFIGS:
        config = tiny_config(name, **changes)
    else:
        model_type, values = OTHERS[name]
        small = {} if "n_embd" in values or "text_config" in values else _SMALL
        config = AutoConfig.for_model(model_type, **{**small, **values, **changes})
    model_class, config = causal_lm(config)
    return Source(ModelSection(name=name, weights="random"), name, config, model_class)


def _ours(name: str, seed: int | None = 3, **changes: Any) -> PreTrainedModel:
    model = hf.build(_source(name, **changes), "eager")
    initialize(model, seed, CPU)
    return model


def _theirs(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    source = _source(name, **changes)
    torch.manual_seed(seed)
    return source.model_class(copy.deepcopy(source.config))


@pytest.mark.parametrize("name", [*LIKE, *OTHERS])
def test_initial_weights_are_distributed_as_transformers_own(name: str) -> None:
    """What two seeds of transformers agree on (norms, biases, tables, padding rows) is equal; the rest has its mean and
    deviation; buffers are equal; tied weights are one; nothing is left without a value."""
    ours, first, second = _ours(name), _theirs(name, 0), _theirs(name, 1)
    theirs = zip(first.named_parameters(), second.parameters(), strict=True)
    for (path, found), ((_, a), b) in zip(ours.named_parameters(), theirs, strict=True):
        fixed = a == b
        assert torch.equal(found[fixed], a[fixed]), path
        drawn, wanted = found[~fixed].detach(), torch.cat([a[~fixed], b[~fixed]]).detach()
        if len(drawn) > 300:
            spread = wanted.std()
            assert abs(drawn.std() / spread - 1) < 5 / len(drawn) ** 0.5, path
            assert abs(drawn.mean() - wanted.mean()) < 6 * spread / len(drawn) ** 0.5, path
    for (path, found), wanted in zip(ours.named_buffers(), first.buffers(), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), path
    for target, origin in ours.all_tied_weights_keys.items():
        assert ours.get_parameter(target) is ours.get_parameter(origin)


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "constructor sets every matrix"])
def test_weights_follow_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = _state(_ours(name))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = _state(_ours(name)), _state(_ours(name, seed=4))
    matrices = [path for path in first if first[path].ndim > 1]
    assert all(torch.equal(first[path], again[path]) for path in first)
    assert all(not torch.equal(first[path], other[path]) for path in matrices)


def test_layers_differ_from_each_other() -> None:
    state = _state(_ours("llama"))
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])


def test_a_padding_row_is_zero() -> None:
    assert not _ours("llama", pad_token_id=5).model.embed_tokens.weight[5].any()


def test_in_bfloat16_where_the_recipe_names_it() -> None:
    source = _source("llama")
    named = Source(ModelSection(name="x", weights="random", dtype="bfloat16"), "x", source.config, source.model_class)
    model = hf.build(named, "eager")
    initialize(model, 3, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_for_a_checkpoint_buffers_have_values_and_parameters_show_that_they_have_none() -> None:
    model, wanted = _ours("gemma3", seed=None), _theirs("gemma3", 0)
    for found, buffer in zip(model.buffers(), wanted.buffers(), strict=True):
        assert torch.equal(found, buffer)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    fill(model, wanted.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))


def test_filling_names_what_does_not_fit() -> None:
    model = _ours("llama", seed=None)
    weights = _state(model)
    del weights["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model.norm.weight should have shape \(48,\), but nothing was given"):
        fill(model, weights)
    with pytest.raises(ModelError, match=r"lm_head.weight should have shape \(97, 48\), but \(1, 48\) was given"):
        fill(model, {**_state(model), "lm_head.weight": torch.zeros(1, 48)})
