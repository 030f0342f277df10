"""References in config values: `${env:NAME}`, `${section.key}`, `$${`."""

from __future__ import annotations

import pytest

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from tests.unit.config_sections import VALUES, Root


def make(**changes: object) -> Root:
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in VALUES.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return from_mapping(Root, values)


def problem(**changes: object) -> str:
    with pytest.raises(RecipeError) as caught:
        make(**changes)
    return str(caught.value)


def test_a_whole_reference_takes_the_type_of_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "2e-5")
    monkeypatch.setenv("REVISION", "010")
    recipe = make(training__learning_rate="${env:LR}", model__revision="${env: REVISION }")
    assert recipe.training.learning_rate == 2e-5
    assert recipe.model.revision == "010"
    assert make(training__max_steps="${seed}", seed=7).training.max_steps == 7


def test_a_reference_inside_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "x")
    recipe = make(seed=3, model__revision="run-${env:NAME}-${seed}-${model.name}")
    assert recipe.model.revision == "run-x-3-org/tiny"
    assert make(training__learning_rate="${seed}e-5", seed=2).training.learning_rate == 2e-5


def test_references_reach_defaults_lists_items_and_other_references() -> None:
    assert make(training__max_steps="${seed}").training.max_steps == 42
    assert make(training__learning_rate="${optimizer.weight_decay}").training.learning_rate == 0.1
    assert make(training__epochs="${optimizer.betas[1]}").training.epochs == 0.999
    assert make(data__train_path=["a", "${model.name}"]).data.train_path == ["a", "org/tiny"]
    assert make(data__columns={"a": "${data.train_path}"}).data.columns == {"a": "a.jsonl"}
    assert make(training__weights="${optimizer.betas}").training.weights == [0.9, 0.999]
    assert make(model__revision="${recipe}", recipe="sft", model__name="${model.revision}").model.name == "sft"


def test_escape_and_text_that_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make(model__name="$${seed} $x {y} $").model.name == "${seed} $x {y} $"
    monkeypatch.setenv("LOOKS", "${seed}")
    assert make(model__name="${env:LOOKS}").model.name == "${seed}", "an environment value is never searched"
    assert make(model__name="a${env:LOOKS}").model.name == "a${seed}"


def test_nothing_but_values_is_interpolated() -> None:
    assert make(data__columns={"${seed}": "a"}).data.columns == {"${seed}": "a"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "${env:NOT_THERE}"}, "model.name: the environment variable NOT_THERE is not set"),
        ({"model__name": "${env:}"}, "wanted the name of an environment variable after env:"),
        ({"model__name": "${model.nam}"}, "model.name: ${model.nam} refers to nothing"),
        ({"model__name": "${HOME}"}, "for the environment variable write ${env:HOME}"),
        ({"model__name": "a${seed"}, "found `${` without its `}`"),
        ({"model__name": "a${model.revision}"}, "${model.revision} is null"),
        ({"model__name": "a${optimizer}"}, "is a list or a section"),
        ({"model__name": "${optimizer}"}, "model.name: found a mapping; wanted text"),
        ({"model__name": "${model.name}"}, "go round in a circle: model.name -> model.name"),
        ({"model__name": "a${model.revision}", "model__revision": "${model.name}"},
         "go round in a circle: model.revision -> model.name -> model.revision"),
        ({"seed": "${model.name}"}, 'seed: found "org/tiny"; wanted an integer'),
        ({"seed": "${data.train_path.0}"}, "refers to nothing"),
        ({"seed": "${}"}, "${} refers to nothing"),
        ({"model__config": {"a": "${model.config}"}}, "found values nested deeper than 50 levels"),
    ],
)  # fmt: skip
def test_broken_references(changes: dict[str, object], message: str) -> None:
    assert message in problem(**changes)


def test_references_cannot_grow_without_bound() -> None:
    columns = {f"k{i}": f"${{data.columns.k{i + 1}}}" * 10 for i in range(8)} | {"k8": "x" * 10}
    assert "characters; wanted 65536 at most" in problem(data__columns=columns)
