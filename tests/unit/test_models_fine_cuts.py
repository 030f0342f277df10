"""A model made as small as what is tried on it allows."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.models.shrink import Degrees, fine_cuts, has_experts, shrink
from meshtune.models.twin import miniature_config, parameter_count
from tests.unit.models_tiny import tiny_source
from tests.unit.test_models_twin import LARGE, _source

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def _smallest(values: dict[str, Any], degrees: Degrees) -> dict[str, Any]:
    return shrink(values, fine_cuts(values, degrees)[0])


@pytest.mark.parametrize(
    ("degree", "wanted"),
    [
        (1, {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
        (2, {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
        (4, {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
    ],
)
def test_heads_stay_grouped_and_fit_the_degree(degree: int, wanted: dict[str, int]) -> None:
    assert _smallest(LLAMA, Degrees(heads=degree)) == wanted


def test_one_key_head_stays_one_and_heads_that_fit_no_degree_stay_so() -> None:
    one = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128}
    assert _smallest(one, Degrees(heads=2))["num_key_value_heads"] == 1
    odd = {"hidden_size": 64 * 25, "n_head": 25}
    assert _smallest(odd, Degrees(heads=2))["n_head"] % 2 == 1


def test_experts_layers_and_an_uneven_vocabulary_stay_what_they_are() -> None:
    values = {**LLAMA, "num_experts": 60, "num_hidden_layers": 32, "vocab_size": 50257}
    found = _smallest(values, Degrees(heads=2, experts=3, layers=4))
    assert (found["num_experts"], found["num_hidden_layers"], found["vocab_size"]) == (24, 4, 127)
    assert has_experts(values) and not has_experts(LLAMA) and not has_experts({"num_experts": 1})


@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_has_a_miniature_that_runs(name: str) -> None:
    source = _source(*LARGE[name])
    config = miniature_config(source, Degrees(heads=2, experts=4))
    assert parameter_count(source, config) <= 4_000_000
    before, after = source.config.to_dict(), config.to_dict()
    assert set(before.get("layer_types") or ()) == set(after.get("layer_types") or ())
    if before["num_attention_heads"] % 2 == 0:
        assert after["num_attention_heads"] % 2 == 0


def test_a_tiny_config_is_left_as_it_is() -> None:
    source = tiny_source("llama")
    assert miniature_config(source, Degrees(heads=2)).to_dict() == source.config.to_dict()
