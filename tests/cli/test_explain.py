"""`meshtune explain`: the mesh and every parameter's place, from the config alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from tests.parity.conversations import make_tokenizer
from tests.parity.models import save_model

Command = Callable[..., Said]


def test_it_draws_the_mesh_and_tells_of_every_parameter(meshtune: Command, recipe: Path) -> None:
    said = meshtune("explain", recipe, "distributed.tp_size=2", "--world", "4")
    assert said.code == 0, said.err
    assert "fsdp2 on 4 ranks: dp_shard 2 x tp 2" in said.out
    assert "tp 2: [0 1], [2 3] cut a layer between them" in said.out
    assert "model.layers.*.self_attn.q_proj.weight (2)  32 x 32" in said.out
    assert "tp: Shard(0), fsdp: Shard(0); local 8 x 32, 1,024 bytes; gradient: reduce-scatter over fsdp 2" in said.out
    assert "model.norm.weight  32" in said.out
    assert "weights on the rank that holds most: at most" in said.out


def test_json_holds_the_same(meshtune: Command, recipe: Path) -> None:
    said = meshtune("explain", recipe, "distributed.tp_size=2", "--world", "2", "--json")
    found = json.loads(said.out)
    assert found["layout"]["axes"]["tp"] == 2
    by_name = {parameter["name"]: parameter for parameter in found["parameters"]}
    assert by_name["model.layers.1.mlp.down_proj.weight"] == {
        "name": "model.layers.1.mlp.down_proj.weight",
        "shape": [32, 48],
        "placement": {"tp": "Shard(1)"},
        "local_shape": [32, 24],
        "bytes": 32 * 24 * 4,
        "reduction": "none",
    }
    assert len(by_name) == 2 * 13 + 3


def test_what_is_frozen_has_no_gradient(meshtune: Command, recipe: Path) -> None:
    said = meshtune("explain", recipe, "model.freeze=[model.layers.0]", "--world", "2", "--json")
    found = {p["name"]: p["reduction"] for p in json.loads(said.out)["parameters"]}
    assert found["model.layers.0.mlp.down_proj.weight"] == "none, it is frozen"
    assert found["model.layers.1.mlp.down_proj.weight"] == "reduce-scatter over fsdp 2"
    lines = meshtune("explain", recipe, "model.freeze=[model.layers.0]", "--world", "2").out
    assert "model.layers.0.mlp.down_proj.weight  32 x 48" in lines


def test_no_weight_is_read(meshtune: Command, tmp_path: Path, recipe: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral", make_tokenizer())
    (model / "model.safetensors").unlink()
    said = meshtune("explain", recipe, f"model.name={model}", "distributed.ep_size=2", "--world", "2")
    assert said.code == 0, said.err
    assert "ep: Shard(0), 4 experts; local 2 x " in said.out
    assert "ep 2: [0 1] have different experts" in said.out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["distributed.tp_size=3", "--world", "3"], "3 ranks cannot share out 4 attention heads evenly"),
        (["distributed.tp_size=2", "--world", "3"], "needs a number of ranks that is a multiple of 2, found 3"),
        (["distributed.ep_size=2", "--world", "2"], "has no experts; write ep_size: 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_an_error(
    meshtune: Command, recipe: Path, settings: list[str], says: str
) -> None:
    said = meshtune("explain", recipe, *settings)
    assert said.code != 0 and says in said.err and "Traceback" not in said.err


def test_the_recipes_own_plan_is_what_is_explained(meshtune: Command, recipe: Path) -> None:
    recipe.write_text(
        recipe.read_text(encoding="utf-8") + 'distributed:\n  tp_size: 2\n  plan: {"model.layers.*.mlp": replicate}\n',
        encoding="utf-8",
    )
    said = meshtune("explain", recipe, "--world", "2", "--json")
    assert said.code == 0, said.err
    placements = {p["name"]: p["placement"]["tp"] for p in json.loads(said.out)["parameters"]}
    assert placements["model.layers.0.mlp.up_proj.weight"] == "Replicate"
    assert placements["model.layers.0.self_attn.q_proj.weight"] == "Shard(0)"


def test_stages_of_a_pipeline_are_told(meshtune: Command, recipe: Path) -> None:
    said = meshtune("explain", recipe, "distributed.pp_size=2", "--world", "2", "--json")
    assert said.code == 0, said.err
    found = {p["name"]: p["placement"]["pp"] for p in json.loads(said.out)["parameters"]}
    assert all(found.values()) and found["model.embed_tokens.weight"] != found["lm_head.weight"]
    assert found["model.layers.0.mlp.up_proj.weight"] != found["model.layers.1.mlp.up_proj.weight"]
