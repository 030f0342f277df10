"""What a written value means: the field's type decides, from file, override and Python alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from meshtune.config import Section, from_mapping, load
from meshtune.errors import RecipeError
from tests.unit.config_sections import BASE, VALUES, Inner, Model, Optimizer, Root


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def read(recipe: Root, key: str):
    value = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


VALUES_AS_WRITTEN = [
    # C85: numbers written the way people write them
    ("training.learning_rate", "1e-5", 1e-5),
    ("training.learning_rate", "1E5", 1e5),
    ("training.learning_rate", "1e+5", 1e5),
    ("training.learning_rate", "1.0e5", 1e5),
    ("training.learning_rate", "1_000", 1000.0),
    ("training.learning_rate", ".5", 0.5),
    ("training.learning_rate", "3", 3.0),
    ("training.learning_rate", "+1.", 1.0),
    ("seed", "1_000", 1000),
    ("seed", "1e3", 1000),
    ("seed", "7.0", 7),
    ("seed", "-0", 0),
    ("seed", "123456789012345678901234567890", 123456789012345678901234567890),
    # C85: text stays as it was written
    ("model.revision", "no", "no"),
    ("model.revision", "off", "off"),
    ("model.revision", "010", "010"),
    ("model.revision", "12:30", "12:30"),
    ("model.revision", "1_000", "1_000"),
    ("model.revision", "1e-5", "1e-5"),
    ("model.revision", "2001-01-01", "2001-01-01"),
    ("model.revision", ".nan", ".nan"),
    ("model.revision", "C:\\runs\\a", "C:\\runs\\a"),
    ("model.revision", "'null'", "null"),
    ("model.revision", '"true"', "true"),
    ("model.revision", '""', ""),
    ("model.revision", "null", None),
    ("model.revision", "~", None),
    ("model.revision", "", None),
    ("model.revision", "none", "none"),
    ("model.attention", "none", "none"),
    ("model.attention", "no", "no"),
    ("model.attention", '"auto"', "auto"),
    # C44: zero and false are values
    ("training.max_grad_norm", "0", 0.0),
    ("training.max_grad_norm", "null", None),
    ("optimizer.weight_decay", "0", 0.0),
    ("data.packing", "false", False),
    ("data.packing", "True", True),
    ("seed", "0", 0),
    # unions
    ("training.workers", "auto", "auto"),
    ("training.workers", "0", 0),
    ("training.compile", "true", True),
    ("training.compile", "reduce-overhead", "reduce-overhead"),
    ("training.mixed", "3", 3),
    ("training.mixed", "3.0", 3.0),
    ("training.mixed", "1e3", 1e3),
    ("training.mixed", "'3'", "3"),
    ("training.mixed", "three", "three"),
    ("training.mixed", "010", "010"),
    ("training.mixed", "", None),
    ("data.train_path", "a.jsonl", "a.jsonl"),
    ("data.train_path", "[a.jsonl, 010]", ["a.jsonl", "010"]),
    ("data.lengths", "[1_0, 2e1]", [10, 20]),
    ("data.lengths", "[]", []),
    ("data.columns", "{messages: no, 1: on}", {"messages": "no", "1": "on"}),
    ("training.weights", "[1, 1e-3]", [1.0, 1e-3]),
    ("optimizer.betas", "[0, 0.95]", (0.0, 0.95)),
    ("model.config", "{a: 1, b: 1e-3, c: no, d: [true, null], e: {f: 1.0}}",
     {"a": 1, "b": 1e-3, "c": "no", "d": [True, None], "e": {"f": 1.0}}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), VALUES_AS_WRITTEN)
def test_override_means_what_the_field_says(write, key: str, text: str, value: object) -> None:
    result = read(load(Root, write(BASE), [f"{key}={text}"]), key)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(("key", "text", "value"), VALUES_AS_WRITTEN)
def test_file_means_what_the_field_says(write, key: str, text: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    lines = [line for line in BASE.splitlines() if line.split(":")[0].strip() != name]
    lines = lines if not section or f"{section}:" in lines else [*lines, f"{section}:"]
    place = lines.index(f"{section}:") + 1 if section else len(lines)
    lines.insert(place, f"{'  ' if section else ''}{name}: {text}")
    result = read(load(Root, write("\n".join(lines))), key)
    assert result == value
    assert type(result) is type(value)


def test_sections_are_frozen_and_strict_in_python_too() -> None:
    recipe = from_mapping(Root, VALUES)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3
    with pytest.raises(ValueError, match="valid integer"):
        Inner(depth="1")
    with pytest.raises(ValueError, match="Extra inputs"):
        Inner(dept=1)


def test_python_door_accepts_ints_tuples_sections_and_paths() -> None:
    values = {
        **VALUES,
        "model": Model(name="a${b}", inner=Inner(depth=2)),
        "data": {"train_path": Path("x") / "a.jsonl"},
        "training": {"learning_rate": 1, "max_steps": 10.0},
        "optimizer": {"betas": [0, 1]},
    }
    recipe = from_mapping(Root, values)
    assert recipe.model == Model(name="a${b}", inner=Inner(depth=2))
    assert recipe.data.train_path == str(Path("x") / "a.jsonl")
    assert recipe.training.learning_rate == 1.0 and type(recipe.training.learning_rate) is float
    assert recipe.training.max_steps == 10 and type(recipe.training.max_steps) is int
    assert recipe.optimizer.betas == (0.0, 1.0)


def test_python_door_and_file_agree(write) -> None:
    assert from_mapping(Root, VALUES) == load(Root, write(BASE))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"learning_rate": "1e-5"},
         'training.learning_rate: found "1e-5"; wanted a number (remove the quotes)'),
        ("training", {"learning_rate": True}, "training.learning_rate: found true; wanted a number"),
        ("training", {"learning_rate": float("nan")}, "wanted a number (it must be finite and fit a float)"),
        ("training", {"learning_rate": 1, "max_steps": True}, "training.max_steps: found true; wanted an"),
        ("training", {"learning_rate": 1, "max_steps": 1.5}, "training.max_steps: found 1.5; wanted an int"),
        ("model", {"name": 3}, "model.name: found 3; wanted text (write text in quotes)"),
        ("model", {"name": None}, "model.name: found null; wanted text"),
        ("model", {"name": object}, "(type); wanted text"),
        ("model", 3, "model: found 3; wanted a section"),
        ("data", {"train_path": "a", "packing": 0}, "data.packing: found 0; wanted true or false"),
        ("data", {"train_path": [1]}, "data.train_path[0]: found 1; wanted text"),
    ],
)  # fmt: skip
def test_python_door_is_as_strict(section: str, values: object, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        from_mapping(Root, {**VALUES, section: values})
    assert message in str(caught.value)


def test_python_door_wants_a_mapping() -> None:
    with pytest.raises(RecipeError, match="found list; wanted a mapping"):
        from_mapping(Root, ["a"])  # type: ignore[arg-type]


def test_empty_section_is_its_defaults_and_null_leaves_an_optional_one_out(write) -> None:
    recipe = load(Root, write(BASE + "optimizer:\n  # name: sgd\npeft:\n"))
    assert recipe.optimizer.name == "adamw"
    assert recipe.peft is None
    assert load(Root, write(BASE), ["peft={}"]).peft.r == 16


def test_windows_file_with_bom_and_crlf_loads_the_same(tmp_path: Path, write) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load(Root, path) == load(Root, write(BASE))


def test_anchors_aliases_and_merge_keys(write) -> None:
    text = BASE + "optimizer: &o {weight_decay: 0.5, betas: [0.1, 0.2]}\n"
    text = text.replace("sft", "&kind sft").replace("  name: org/tiny", "  name: *kind")
    assert load(Root, write(text)).model.name == "sft"
    merged = "shared: &s {weight_decay: 0.5, name: sgd}\n" + BASE + "optimizer: {<<: *s, name: adamw}\n"
    with pytest.raises(RecipeError, match="shared: found an unknown key") as caught:
        load(Root, write(merged))
    assert len(caught.value.problems) == 1
    inline = BASE + "optimizer:\n  name: adamw\n  <<: [{weight_decay: 0.5, name: sgd}, {weight_decay: 0.7}]\n"
    assert load(Root, write(inline)).optimizer.weight_decay == 0.5
    assert load(Root, write(inline)).optimizer.name == "adamw"


def test_base_merges_deeply_in_order_and_relative_to_its_own_file(tmp_path: Path, write) -> None:
    (tmp_path / "shared").mkdir()
    write(BASE.replace("a.jsonl", "root.jsonl") + "seed: 1\n", "shared/root.yaml")
    write("base: root.yaml\nseed: 2\noptimizer: {weight_decay: 0.2, betas: [0.1, 0.2]}\n", "shared/middle.yaml")
    write("optimizer: {weight_decay: 0.3}\ntraining: {epochs: 3}\n", "other.yaml")
    child = "base: [shared/middle.yaml, other.yaml]\ntraining:\n  epochs: null\n  max_steps: 5\n"
    recipe = load(Root, write(child))
    assert (recipe.seed, recipe.data.train_path) == (2, "root.jsonl")
    assert (recipe.optimizer.weight_decay, recipe.optimizer.betas) == (0.3, (0.1, 0.2))
    assert (recipe.training.epochs, recipe.training.max_steps) == (None, 5)
    assert recipe.training.learning_rate == 1e-5


def test_override_addresses_list_items_written_or_default(write) -> None:
    path = write(BASE.replace("a.jsonl", "[a, b]"))
    assert load(Root, path, ["data.train_path[1]=c"]).data.train_path == ["a", "c"]
    assert load(Root, path, ["data.train_path.0=010"]).data.train_path == ["010", "b"]
    assert load(Root, path, ["optimizer.betas.1=0.95"]).optimizer.betas == (0.9, 0.95)
    assert load(Root, path, ["optimizer.betas[0]=0"]).optimizer.betas == (0.0, 0.999)


def test_overrides_last_one_wins_and_a_mapping_replaces_the_section(write) -> None:
    path = write(BASE + "optimizer: {name: sgd, weight_decay: 0.5}\n")
    assert load(Root, path, ["seed=1", "seed=2"]).seed == 2
    recipe = load(Root, path, ["optimizer={weight_decay: 0.7}"])
    assert (recipe.optimizer.name, recipe.optimizer.weight_decay) == ("adamw", 0.7)
    assert load(Root, path, ["peft.r=4"]).peft.r == 4
    assert load(Root, path, ["model.inner.depth=9"]).model.inner.depth == 9
    assert load(Root, path, ["data.columns.text=body"]).data.columns == {"text": "body"}
    assert load(Root, path, ["model.name=a=b"]).model.name == "a=b"


class Tuned(Section):
    optimizer: Optimizer = Field(Optimizer(name="sgd"), description="A default unlike the section's own.")
    seed: int = Field(0, description="Seed.")


def test_override_inside_an_unwritten_section_means_what_writing_it_in_the_file_means(write) -> None:
    assert load(Tuned, write("seed: 1\n")).optimizer.name == "sgd"
    from_file = load(Tuned, write("optimizer:\n  weight_decay: 0.5\n"))
    assert load(Tuned, write("seed: 0\n"), ["optimizer.weight_decay=0.5"]) == from_file


def test_override_of_a_missing_value_mends_the_file(write) -> None:
    path = write(BASE.replace("  learning_rate: 1e-5", "  max_steps: 3"))
    assert load(Root, path, ["training.learning_rate=2e-5"]).training.learning_rate == 2e-5
