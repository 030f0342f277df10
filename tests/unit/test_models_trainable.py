"""What is trained, by patterns: chosen on the whole model, a tied weight by any of its names (C81)."""

from __future__ import annotations

import re

import pytest
import torch

from meshtune.config import from_mapping
from meshtune.config.patterns import covers, matches
from meshtune.errors import ModelError, RecipeError
from meshtune.models.section import ModelSection
from meshtune.models.trainable import by_patterns, find_trained, freeze
from meshtune.parallel.activation_checkpointing import checkpoint_activations
from tests.unit.models_tiny import tiny_model

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("patterns", "covered"),
    [
        (["q_proj"], True),
        (["layers.1"], True),
        (["layers.10"], False),
        (["proj"], False),
        (["*_proj"], True),
        (["layers.*.q_proj"], True),
        (["layers.[0-3]"], True),
        (["layers.[2-3]"], False),
        (["model"], True),
        ([NAME], True),
        ([], False),
        (r".*layers\.[01]\..*", True),
        (r"layers", False),
        (r"(?!.*q_proj).*", False),  # of the parameter's name, not of a module above it
    ],
)
def test_lists_name_ends_and_texts_are_regular_expressions(patterns: str | list[str], covered: bool) -> None:
    assert covers(patterns, NAME) is covered


def test_a_module_is_named_by_its_own_end() -> None:
    assert matches(["q_proj"], "model.layers.1.self_attn.q_proj")
    assert not matches(["layers.1"], "model.layers.1.self_attn.q_proj")


def test_a_tied_weight_goes_by_any_of_its_names_and_counts_once() -> None:
    model = tiny_model("llama-tied")
    embedding = model.model.embed_tokens.weight
    for trainable, frozen, tied in (
        (None, ["lm_head"], False),
        (["lm_head"], None, True),
        (["embed_tokens"], None, True),
    ):
        trained = find_trained(model, by_patterns(model, trainable, frozen))
        freeze(model, trained)
        assert embedding.requires_grad is tied
        assert trained.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained.tensors == sum(p.requires_grad for p in model.parameters())
        assert ("lm_head.weight" in trained.names) is tied


def test_freeze_takes_away_from_what_is_trainable() -> None:
    model = tiny_model("llama")
    chosen = by_patterns(model, ["layers.1"], ["*norm", "mlp"])
    names = {name for name, _ in model.named_parameters() if chosen(name)}
    assert names == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"}


@pytest.mark.parametrize(
    ("trainable", "frozen", "says"),
    [
        (["q_prj"], None, "model.trainable: 'q_prj' matches no parameter of the model; did you mean q_proj"),
        (None, ["layers.0", "layers.7"], "model.freeze: 'layers.7' matches no parameter"),
        ("lm_head", None, "model.trainable: the regular expression 'lm_head' matches no whole name"),
        (None, ["model", "lm_head"], "leaves no parameter to train"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_an_error(trainable: object, frozen: object, says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        by_patterns(tiny_model("llama"), trainable, frozen)  # type: ignore[arg-type]


@pytest.mark.parametrize("patterns", [[], [""], "(", ""])
def test_patterns_that_cannot_match_are_refused_in_the_recipe(patterns: object) -> None:
    with pytest.raises(RecipeError, match="freeze"):
        from_mapping(ModelSection, {"name": "x", "freeze": patterns})


def test_nothing_runs_backward_through_frozen_blocks_below() -> None:
    """transformers lets the embedding's output require a gradient where blocks are checkpointed."""
    model = tiny_model("llama").train()
    freeze(model, by_patterns(model, None, ["embed_tokens", "layers.0"]))
    checkpoint_activations(model, "full")
    inputs = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _module, given: inputs.append(given[0].requires_grad))
    output = model.model.layers[0].register_forward_hook(lambda _m, _i, out: inputs.append(out.requires_grad))
    model(torch.arange(6)[None]).logits.sum().backward()
    output.remove()
    assert not any(inputs)
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None
