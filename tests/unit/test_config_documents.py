"""What is written from the sections themselves: JSON Schema, reference, starter recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping, json_schema, load, reference, starter
from meshtune.errors import RecipeError
from tests.unit.config_sections import VALUES, Root, Training

SCHEMA = json_schema(Root)


def definition(name: str, key: str) -> dict[str, Any]:
    return SCHEMA["$defs"][name]["properties"][key]


def test_schema_is_json_and_closed_and_describes_every_key() -> None:
    json.dumps(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for item in (SCHEMA, *SCHEMA["$defs"].values()):
        assert item["additionalProperties"] is False
        assert all(prop["description"] for prop in item["properties"].values())


def test_schema_has_choices_bounds_and_defaults() -> None:
    dtype = definition("Model", "dtype")
    assert dtype["default"] == "auto"
    assert dtype["anyOf"][0] == {"enum": ["auto", "float32", "bfloat16"], "type": "string"}
    assert definition("Training", "learning_rate")["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert list(definition("Optimizer", "betas")["default"]) == [0.9, 0.999]


@pytest.mark.parametrize(
    ("name", "key"),
    [("Training", "learning_rate"), ("Training", "max_steps"), ("Data", "packing"), ("Model", "dtype")],
)
def test_schema_lets_a_reference_stand_for_any_value(name: str, key: str) -> None:
    strings = [option for option in definition(name, key)["anyOf"] if "pattern" in option]
    assert len(strings) == 1 and strings[0]["type"] == "string"
    assert strings[0]["pattern"].startswith(r"\$\{.+\}")


def test_schema_lets_references_stand_inside_lists_and_text_look_like_a_number() -> None:
    items = definition("Optimizer", "betas")["anyOf"][0]["prefixItems"]
    assert all(any("pattern" in option for option in item["anyOf"]) for item in items)
    assert definition("Model", "name")["type"] == ["string", "number"]
    assert definition("Data", "train_path")["anyOf"][1]["items"]["type"] == ["string", "number"]


def test_schema_requires_what_is_required_unless_a_base_brings_it() -> None:
    assert "required" not in SCHEMA
    assert SCHEMA["if"] == {"required": ["base"]}
    assert SCHEMA["else"]["required"] == ["recipe", "model", "data", "training"]
    assert SCHEMA["else"]["properties"]["training"] == {"required": ["learning_rate"]}
    assert SCHEMA["properties"]["base"]["description"]


def test_reference_lists_every_key_once_with_type_default_and_meaning() -> None:
    text = reference(Root)
    for row in (
        "| `recipe` | one of sft, pretrain | **required** | What is trained. |",
        "| `seed` | an integer | `42` | Seed of everything random. |",
        "| `optimizer` | a section | its own defaults | The optimizer. |",
        "| `learning_rate` | a number > 0 | **required** | Peak learning rate. |",
        "| `max_steps` | an integer >= 1 or null | not set | Optimizer steps. |",
        "| `betas` | a list of 2: a number, a number | `[0.9, 0.999]` | Decay of the moments. |",
        "| `attention` | one of none, no, auto, sdpa | `auto` | Attention \\| backend. |",
        "| `columns` | a mapping of names to text or null | not set | Own names of columns. |",
        "| `base` | text or a list of text | not set |",
        "## `model.inner`\n\nA section inside a section.\n\n| Key |",
    ):
        assert text.count(row) == 1, row
    assert text == reference(Root)


def test_starter_holds_the_values_and_offers_the_rest_as_comments(tmp_path: Path) -> None:
    values = {**VALUES, "optimizer": {"betas": [0.9, 0.95]}}
    text = starter(Root, values)
    assert "  # Peak learning rate.\n  learning_rate: 1.0e-05\n" in text
    assert "  # max_steps: null  # Optimizer steps.\n" in text
    assert "# seed: 42  # Seed of everything random.\n" in text
    assert text.rstrip().endswith("# Further sections, described in the recipe reference: model.inner, peft.")
    path = tmp_path / "starter.yaml"
    path.write_text(text, encoding="utf-8")
    assert load(Root, path) == from_mapping(Root, values)


def test_starter_loads_with_every_offered_key_switched_on(tmp_path: Path) -> None:
    offered = {
        "seed",
        *Training.model_fields,
        "dtype",
        "attention",
        "revision",
        "packing",
        "columns",
        "lengths",
    }
    lines = [
        line.replace("# ", "", 1) if line.strip().removeprefix("# ").split(":")[0] in offered else line
        for line in starter(Root, VALUES).splitlines()
    ]
    path = tmp_path / "starter.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert load(Root, path) == from_mapping(Root, VALUES)


def test_starter_keeps_references_and_empty_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "org/other")
    text = starter(Root, {**VALUES, "model": {"name": "${env:MODEL}"}, "optimizer": {}})
    path = tmp_path / "starter.yaml"
    path.write_text(text, encoding="utf-8")
    assert load(Root, path).model.name == "org/other"
    assert '"${env:MODEL}"' in text


def test_starter_refuses_values_that_are_no_recipe() -> None:
    with pytest.raises(RecipeError, match=r"model\.name: required and not written"):
        starter(Root, {**VALUES, "model": {}})
