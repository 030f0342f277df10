"""The resolved recipe reloads equal, whatever it holds; and its hash says only what it holds."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from meshtune.config import dump, from_mapping, load, recipe_hash
from tests.unit.config_sections import BASE, VALUES, Model, Root, Training

TEXTS = [
    "", " ", "a", "a b", " a", "a ", "~", "null", "Null", "true", "False", "yes", "no", "on", "off", "y",
    "N", "none", "1", "010", "1e-5", "1_000", ".5", "+1", "-", "--", "---", "...", "?", ":", "a:", "a: b",
    "a:b", "#", "a #b", "a#b", "*a", "&a", "!a", "!!int 3", "%a", "@a", "`a`", "|", ">", "[a]", "{a: b}",
    "a,b", "[", "}", "'", '"', "it's", 'say "x"', "\\", "C:\\runs\\new", "a\nb", "\n", "\ta", "a\t",
    "\r\n", "\x00", "\x07", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "é", "日本語", "😀", "${a}", "$${a}",
    "$$${a}", "${", "$", "$$", "a${env:HOME}b", "12:30", "2001-01-01", ".inf", "nan", "NaN", "inf", "0x10",
    "0o7", "<<", "=", "./a/b.jsonl", "../x", "/abs/path-1.2_3", "org/Name-0.6B", "https://x.y/z?a=b",
    "x" * 5000, "end.", ".hidden", "a..b", "key=value", "a@b",
]  # fmt: skip

FLOATS = [
    0.0, 1.0, 0.1, 1e-5, 1e5, 1e16, 1e22, 123456789.123456789, 5e-324, 1.7976931348623157e308, 2.0**-1074,
    0.1 + 0.2, 1 / 3, 1e-7, 2e-5, 9007199254740993.0,
]  # fmt: skip


def reload(recipe: Root, tmp_path: Path) -> Root:
    path = tmp_path / "recipe.resolved.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    return load(Root, path)


def with_values(**training: Any) -> Root:
    return from_mapping(Root, {**VALUES, "training": {"learning_rate": 1e-5, **training}})


@pytest.mark.parametrize("text", TEXTS)
def test_text_reloads_equal_everywhere(text: str, tmp_path: Path) -> None:
    escaped = text.replace("${", "$${")
    values = {
        **VALUES,
        "model": {"name": escaped, "revision": escaped, "config": {"k": [escaped, {"x": escaped}]}},
        "data": {"train_path": [escaped, escaped], "columns": {"a": escaped, text[:1000]: "b"}},
    }
    recipe = from_mapping(Root, values)
    assert recipe.model.name == text
    assert reload(recipe, tmp_path) == recipe


@pytest.mark.parametrize("text", [text for text in TEXTS if "${" not in text])
def test_other_yaml_readers_see_the_same_text(text: str) -> None:
    recipe = from_mapping(Root, {**VALUES, "model": {"name": text}})
    for version in ((1, 1), (1, 2)):
        yaml = YAML(typ="safe", pure=True)
        yaml.version = version
        assert yaml.load(dump(recipe))["model"]["name"] == text


@pytest.mark.parametrize("value", [*FLOATS, *(-value for value in FLOATS)])
def test_floats_reload_bit_equal(value: float, tmp_path: Path) -> None:
    recipe = with_values(epochs=value, mixed=value, weights=[value])
    again = reload(recipe, tmp_path)
    for before, after in (
        (recipe.training.epochs, again.training.epochs),
        (recipe.training.mixed, again.training.mixed),
        (recipe.training.weights[0], again.training.weights[0]),
    ):
        assert type(after) is float
        assert struct.pack("<d", before) == struct.pack("<d", after)
    assert YAML(typ="safe", pure=True).load(dump(recipe))["training"]["epochs"] == value


def test_random_values_reload_equal(tmp_path: Path) -> None:
    rng = random.Random(0)
    alphabet = [
        *map(chr, range(0x20, 0x7F)),
        "\n",
        "\t",
        "é",
        "\u2028",
        "\x85",
        "😀",
        "${",
        "}",
        "$",
        ": ",
        " #",
        "- ",
    ]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        number = struct.unpack("<d", rng.randbytes(8))[0]
        recipe = Root(
            recipe="sft",
            seed=rng.randrange(-(2**70), 2**70),
            model=Model(name=text, config={text: text, "n": number if math.isfinite(number) else 0.5}),
            data=from_mapping(Root, VALUES).data,
            training=Training(
                learning_rate=max(rng.random(), 1e-9),
                workers=rng.choice(["auto", 0, 3]),
                compile=rng.choice([True, False, "reduce-overhead"]),
                mixed=rng.choice([text, number if math.isfinite(number) else None, 3, 3.0, "3", "null", None]),
                max_grad_norm=rng.choice([None, 0.0, 1.0]),
            ),
        )
        again = reload(recipe, tmp_path)
        assert again == recipe, dump(recipe)
        assert type(again.training.mixed) is type(recipe.training.mixed)


def test_none_is_left_out_where_it_is_the_default_and_written_where_it_is_not(tmp_path: Path) -> None:
    recipe = with_values(max_grad_norm=None)
    text = dump(recipe)
    assert "  max_grad_norm: null\n" in text
    assert "max_steps" not in text and "peft" not in text
    assert reload(recipe, tmp_path) == recipe


def test_dump_is_readable_and_in_declared_order() -> None:
    assert dump(with_values(weights=[1.0, 1e-05])) == (
        "recipe: sft\n"
        "seed: 42\n"
        "model:\n  name: org/tiny\n  dtype: auto\n  attention: auto\n  inner:\n    depth: 1\n"
        "data:\n  train_path: a.jsonl\n  packing: false\n"
        "training:\n  learning_rate: 1.0e-05\n  max_grad_norm: 1.0\n  workers: auto\n  compile: false\n"
        "  weights: [1.0, 1.0e-05]\n"
        "optimizer:\n  name: adamw\n  betas: [0.9, 0.999]\n  weight_decay: 0.1\n"
    )


def test_empty_collections_reload_equal(tmp_path: Path) -> None:
    recipe = from_mapping(
        Root,
        {
            **VALUES,
            "data": {"train_path": [], "columns": {}, "lengths": []},
            "model": {"name": "a", "config": {}},
        },
    )
    assert reload(recipe, tmp_path) == recipe


def test_hash_is_of_the_settings_and_not_of_the_way_they_were_written(tmp_path: Path) -> None:
    recipe = from_mapping(Root, VALUES)
    path = tmp_path / "r.yaml"
    path.write_text("# comment\nseed: 4_2\n" + BASE.replace("1e-5", "0.00001"), encoding="utf-8")
    assert recipe_hash(recipe) == recipe_hash(load(Root, path)) == recipe_hash(reload(recipe, tmp_path))
    assert len(recipe_hash(recipe)) == 64
    assert recipe_hash(recipe) != recipe_hash(load(Root, path, ["seed=43"]))
    assert recipe_hash(with_values(mixed="1")) != recipe_hash(with_values(mixed=1))
