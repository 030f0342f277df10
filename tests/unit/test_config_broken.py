# ruff: noqa: E501
"""Broken recipes: every problem at once, each with file, line, path, what was found and what is wanted (C86)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from meshtune.config import Problem, load
from meshtune.errors import MeshtuneError, RecipeError
from tests.unit.config_sections import BASE, Root


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(text: str | bytes, overrides: tuple[str, ...] = ()) -> list[str]:
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load(Root, "r.yaml", overrides)
    lines = str(caught.value).splitlines()
    assert lines == [str(problem) for problem in caught.value.problems]
    return lines


def swap(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


# BASE has seven lines; what is added stands on line 8.
BROKEN = {
    "typo": (swap("learning_rate", "learning_rat"), "r.yaml:7: training.learning_rat: found an unknown key; did you mean learning_rate?"),
    "initials": (swap("learning_rate", "lr"), "r.yaml:7: training.lr: found an unknown key; did you mean learning_rate?"),
    "other case": (swap("train_path", "Train-Path"), "r.yaml:5: data.Train-Path: found an unknown key; did you mean train_path?"),
    "misplaced": (swap("  train_path", "  learning_rate: 1\n  train_path"), "r.yaml:5: data.learning_rate: found an unknown key; it belongs in training"),
    "misplaced at top": (BASE + "max_steps: 3\n", "r.yaml:8: max_steps: found an unknown key; it belongs in training"),
    "misplaced in section": (BASE + "  seed: 3\n", "r.yaml:8: training.seed: found an unknown key; it belongs at the top level"),
    "section typo": (BASE + "optimiser: {}\n", "r.yaml:8: optimiser: found an unknown key; did you mean optimizer?"),
    "near elsewhere": (BASE + "max_step: 3\n", "r.yaml:8: max_step: found an unknown key; did you mean training.max_steps?"),
    "unlike any": (BASE + "peft: {foo: 1}\n", "r.yaml:8: peft.foo: found an unknown key; wanted one of the keys of peft: r"),
    "missing key": (swap("  name: org/tiny", "  dtype: auto"), "r.yaml:2: model.name: required and not written; wanted text (Hub id or folder.)"),
    "missing section": ("recipe: sft\n", "r.yaml:1: model: required and not written; wanted a section `model:` with name"),
    "empty required section": (swap("  name: org/tiny\n", ""), "r.yaml:2: model.name: required and not written"),
    "word for number": (swap("1e-5", "fast"), "r.yaml:7: training.learning_rate: found fast; wanted a number"),
    "quoted number": (swap("1e-5", "'1e-5'"), 'r.yaml:7: training.learning_rate: found "1e-5"; wanted a number (remove the quotes)'),
    "block text": (swap("1e-5", "|\n    1e-5"), 'r.yaml:7: training.learning_rate: found "1e-5\\n"; wanted a number'),
    "infinite": (swap("1e-5", ".inf"), "r.yaml:7: training.learning_rate: found .inf; wanted a number (it must be finite)"),
    "nan": (swap("1e-5", "NaN"), "r.yaml:7: training.learning_rate: found NaN; wanted a number (it must be finite)"),
    "too large": (swap("1e-5", "1e999"), "found 1e999; wanted a number (it must be finite and fit a float)"),
    "too small": (swap("1e-5", "1e-999"), "found 1e-999; wanted a number (it is too small for a float)"),
    "leading zero": (BASE + "seed: 010\n", "r.yaml:8: seed: found 010; wanted an integer (remove the leading zeros)"),
    "sexagesimal": (BASE + "seed: 12:30\n", "r.yaml:8: seed: found 12:30; wanted an integer"),
    "comma": (BASE + "seed: 1,000\n", "r.yaml:8: seed: found 1,000; wanted an integer"),
    "huge integer": (BASE + "seed: 1e99999999999\n", "r.yaml:8: seed: found 1e99999999999; wanted an integer"),
    "fraction": (BASE + "  max_steps: 1.5\n", "r.yaml:8: training.max_steps: found 1.5; wanted an integer or null"),
    "out of bounds": (BASE + "  max_steps: 0\n", "r.yaml:8: training.max_steps: found 0; wanted a value greater than or equal to 1"),
    "out of bounds by reference": (BASE + "  max_steps: ${seed}\nseed: -1\n", "r.yaml:8: training.max_steps: found -1; wanted a value greater"),
    "too few items": (BASE + "  weights: []\n", "r.yaml:8: training.weights: found []; wanted at least 1 item"),
    "bad items": (BASE + "  weights:\n    - 1\n    - x\n", "r.yaml:10: training.weights[1]: found x; wanted a number"),
    "nothing": (swap("1e-5", "\n\n"), "r.yaml:7: training.learning_rate: found nothing; wanted a number"),
    "null": (swap("org/tiny", "~"), "r.yaml:3: model.name: found ~; wanted text"),
    "boolean for text": (swap("org/tiny", "true"), "r.yaml:3: model.name: found true; wanted text (put it in quotes if the text is meant)"),
    "list for text": (swap("org/tiny", "[a]"), "r.yaml:3: model.name: found a list; wanted text"),
    "yes": (BASE + "  compile: yes\n", "r.yaml:8: training.compile: found yes; wanted reduce-overhead or true or false (did you mean true?)"),
    "quoted boolean": (BASE + "  compile: 'true'\n", 'found "true"; wanted reduce-overhead or true or false (remove the quotes)'),
    "number for boolean": (BASE + "  compile: 1\n", "r.yaml:8: training.compile: found 1; wanted"),
    "choice typo": (swap("  name:", "  dtype: float23\n  name:"), "r.yaml:3: model.dtype: found float23; wanted one of auto, float32, bfloat16 (did you mean float32?)"),
    "choice case": (swap("sft", "SFT"), "r.yaml:1: recipe: found SFT; wanted one of sft, pretrain (did you mean sft?)"),
    "choice": (swap("sft", "dpo"), "r.yaml:1: recipe: found dpo; wanted one of sft, pretrain"),
    "choice or number": (BASE + "  workers: atuo\n", "r.yaml:8: training.workers: found atuo; wanted auto or an integer (did you mean auto?)"),
    "mapping for list": (swap("a.jsonl", "{a: b}"), "r.yaml:5: data.train_path: found a mapping; wanted text or a list of text"),
    "wrong length": (BASE + "optimizer: {betas: [0.9]}\n", "r.yaml:8: optimizer.betas: found a list of 1; wanted a list of 2: a number, a number"),
    "scalar for list": (BASE + "optimizer: {betas: 0.9}\n", "r.yaml:8: optimizer.betas: found 0.9; wanted a list of 2"),
    "scalar for section": (BASE + "optimizer: adamw\n", "r.yaml:8: optimizer: found adamw; wanted a section"),
    "null for section": (BASE + "optimizer: null\n", "r.yaml:8: optimizer: found null; wanted a section"),
    "combination": (BASE + "  max_steps: 5\n  epochs: 3\n", "r.yaml:9: training.epochs: found beside max_steps; wanted one of the two"),
    "combination of sections": (swap("sft", "pretrain") + "peft: {r: 2}\n", "r.yaml:8: peft: found with recipe pretrain; wanted sft"),
    "duplicate": (BASE + "  learning_rate: 3\n", "r.yaml:8: training.learning_rate: found this key a second time (first on line 7); wanted it once"),
    "duplicate section": (BASE + "model: {}\n", "r.yaml:8: model: found this key a second time (first on line 2); wanted it once"),
    "code": (BASE + "seed: !!python/object/apply:os.system ['x']\n", "r.yaml:8: seed: found the tag !!python/object/apply:os.system; wanted a value without a tag"),
    "tag": (BASE + "seed: !!int 3\n", "r.yaml:8: seed: found the tag !!int; wanted a value without a tag"),
    "alias": (swap("a.jsonl", "*.jsonl"), "r.yaml:5: data.train_path: found *.jsonl, a YAML alias; wanted the anchor &.jsonl before it, or quotes"),
    "merge": (BASE + "<<: 3\n", "r.yaml:8: <<: found a value to merge; wanted a mapping or a list of them"),
    "key": (BASE + "? [a]\n: 1\n", "r.yaml:8: found a list or a mapping as a key; wanted a name"),
    "two documents": (BASE + "---\na: 1\n", "r.yaml:9: found a second YAML document; wanted one recipe in a file"),
    "tab": (BASE + "\tepochs: 1\n", "r.yaml:8: found a tab where YAML wants spaces; indent with spaces"),
    "indentation": (BASE + " epochs: 1\n", "r.yaml:8: not valid YAML: "),
    "open list": (swap("a.jsonl", "[a"), "r.yaml:6: not valid YAML: expected ',' or ']', but got ':' (column 9), while parsing a flow sequence that begins on line 5"),
    "open quote": (swap("a.jsonl", '"a'), "while scanning a quoted scalar that begins on line 5"),
    "colon": (swap("a.jsonl", "a: b"), "r.yaml:5: not valid YAML: mapping values are not allowed here (column 16); check the indentation"),
    "at sign": (swap("a.jsonl", "@a"), "r.yaml:5: not valid YAML: found character '@' that cannot start any token (column 15); put the value in quotes"),
    "reference in braces": (BASE + "peft: {r: ${seed}}\n", "r.yaml:8: not valid YAML: expected ',' or '}', but got '{' (column 12); inside braces and brackets, put `${...}` in quotes"),
    "control character": (BASE + "seed: \x00\n", "r.yaml:8: found the character U+0000; wanted it as an escape in double quotes"),
    "too deep": (BASE + "seed: " + "[" * 60, "r.yaml:8: found values nested deeper than 50 levels"),
    "not UTF-8": (b"a: 1\nb: \xff\n", "r.yaml:2: found bytes that are not UTF-8; save the file as UTF-8"),
    "empty": ("", "r.yaml: found an empty file; wanted a mapping of sections"),
    "only comments": ("# seed: 1\n", "r.yaml: found an empty file; wanted a mapping of sections"),
    "list": ("- a\n", "r.yaml:1: found a list; wanted a mapping of sections"),
    "text": ("\nhello\n", "r.yaml:2: found a single value; wanted a mapping of sections"),
    "circle": (BASE + "seed: ${seed}\n", "r.yaml:8: seed: found references that go round in a circle: seed -> seed"),
    "reference": (swap("org/tiny", "${model.nam}"), "r.yaml:3: model.name: ${model.nam} refers to nothing"),
    "base missing": ("base: nope.yaml\n" + BASE, "r.yaml:1: base: there is no file nope.yaml"),
    "base of no kind": ("base: {a: 1}\n" + BASE, "r.yaml:1: base: found a list or a mapping; wanted the path of a recipe file"),
    "base reference": ("base: ${env:X}\n" + BASE, "r.yaml:1: base: found ${env:X}; wanted the path of a recipe file"),
    "base in section": (swap("  name", "  base: a\n  name"), "r.yaml:3: model.base: found an unknown key; only a recipe file can name its base"),
    "base is itself": ("base: r.yaml\n" + BASE, "r.yaml:1: base: found bases that go round in a circle, back to r.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_recipe(name: str) -> None:
    text, expected = BROKEN[name]
    lines = problems_of(text)
    assert any(expected in line for line in lines), lines


BROKEN_OVERRIDES = {
    "training.lr": "found no `=`; wanted section.key=value",
    "=3": "found the key ``; wanted section.key=value",
    "training.=3": "found the key `training.`; wanted section.key=value",
    "optimizer.betas[0=3": "found the key `optimizer.betas[0`; wanted section.key=value",
    "training.learning_rat=3": "training.learning_rat: found an unknown key; did you mean learning_rate?",
    "training.learning_rate='3'": 'training.learning_rate: found "3"; wanted a number (remove the quotes)',
    "training.learning_rate=": "training.learning_rate: found nothing; wanted a number",
    "training.max_steps=1.5": "training.max_steps: found 1.5; wanted an integer or null",
    "optimizer.betas.2=1": "optimizer.betas has 2 items, counted from 0, and no item 2",
    "optimizer.betas.x=1": "optimizer.betas has 2 items, counted from 0, and no item x",
    "data.train_path.0=a": "data.train_path is no list or section, so it has no 0; wanted data.train_path=...",
    "training.weights.0=1": "training.weights is no list or section, so it has no 0; wanted training.weights=...",
    "seed=[1": "seed: not valid YAML: expected ',' or ']'",
    "seed=1: 2": "seed: not valid YAML: mapping values are not allowed here",
    "seed=1\nrecipe: x": "seed: found more than one value; wanted one",
    "model.revision=#3": "model.revision: found a `#`, which begins a comment in YAML; wanted the value in quotes",
    "model.revision=a #b": "model.revision: found a `#`, which begins a comment in YAML; wanted the value in quotes",
    "data.train_path=*.jsonl": "data.train_path: found *.jsonl, a YAML alias",
    "base=x.yaml": "base: only a file can name its base",
    "model=null": "model: found null; wanted a section",
    "--seed=3": "--seed: found an unknown key; did you mean seed?",
    "training={learning_rate: 1, epochs: 1, max_steps: 1}": "training.epochs: found beside max_steps",
}


@pytest.mark.parametrize("override", BROKEN_OVERRIDES)
def test_broken_override_is_named(override: str) -> None:
    text = "\n".join(problems_of(BASE, (override,)))
    assert text.startswith(f'override "{override}": '.replace("\n", "\\n"))
    assert BROKEN_OVERRIDES[override] in text


def test_all_problems_of_all_kinds_at_once_in_reading_order() -> None:
    Path("base.yaml").write_text("optimizer:\n  weight_decay: -1\n  momentum: 0\n", encoding="utf-8")
    text = "base: base.yaml\n" + BASE.replace("1e-5", "x") + "data: 3\nseed: no\npeft:\n  r: 1\n  r: 2\n"
    assert problems_of(text, ("training.epoch=3", "nothing")) == [
        "r.yaml:8: training.learning_rate: found x; wanted a number",
        "r.yaml:9: data: found this key a second time (first on line 5); wanted it once",
        "r.yaml:10: seed: found no; wanted an integer",
        "r.yaml:13: peft.r: found this key a second time (first on line 12); wanted it once",
        "base.yaml:2: optimizer.weight_decay: found -1; wanted a value greater than or equal to 0",
        "base.yaml:3: optimizer.momentum: found an unknown key; "
        "wanted one of the keys of optimizer: name, betas, weight_decay",
        'override "training.epoch=3": training.epoch: found an unknown key; did you mean epochs?',
        'override "nothing": found no `=`; wanted section.key=value',
    ]


def test_a_section_that_is_sound_reports_its_combinations_beside_the_faults_of_others() -> None:
    lines = problems_of(BASE + "  max_steps: 5\n  epochs: 3\nseed: x\n")
    assert [line.split(": ")[1] for line in lines] == ["training.epochs", "seed"]


def test_missing_file_and_folder() -> None:
    for path, expected in (("zz.yaml", "zz.yaml: there is no file zz.yaml"), (".", ".: cannot read .: ")):
        with pytest.raises(RecipeError) as caught:
            load(Root, path, ["oops"])
        assert str(caught.value).startswith(expected)
        assert 'override "oops"' in str(caught.value)


def test_circle_of_bases_names_the_file_that_closes_it() -> None:
    os.mkdir("deep")
    Path("deep/two.yaml").write_text("seed: 1\nbase: ../r.yaml\n", encoding="utf-8")
    expected = f"{os.path.join('deep', 'two.yaml')}:2: base: found bases that go round in a circle, back to r.yaml"
    assert problems_of("base: deep/two.yaml\n") == [expected]


def test_aliases_that_multiply_are_not_followed_where_no_field_wants_them() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert len(problems_of(BASE + "\n".join(lines))) == 12


def test_recipe_error_carries_its_problems_and_survives_pickling() -> None:
    error = RecipeError([Problem("a.b", "found x; wanted y", "r.yaml", 3), Problem("", "no", None)])
    assert str(error) == "r.yaml:3: a.b: found x; wanted y\nno"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.problems, str(copy)) == (error.problems, str(error))
    assert isinstance(error, MeshtuneError)
    assert RecipeError("plain text").problems == [Problem("", "plain text")]


def test_overrides_as_one_string_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="sequence of strings"):
        load(Root, "r.yaml", "seed=3")
