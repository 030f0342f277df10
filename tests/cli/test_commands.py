"""check, init, schema, --version, --help: what they print, and that it can be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ruamel.yaml import YAML

import meshtune as package
from meshtune.config import load
from meshtune.recipes.recipe import Recipe
from tests.cli.conftest import Said

Command = Callable[..., Said]
EXAMPLES = sorted((Path(package.__file__).parent.parent / "examples").glob("*.yaml"))

# --- check ----------------------------------------------------------------------------------------------------------


def test_check_prints_the_resolved_recipe(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    """It loads equal, says more in comments, and nothing has been written."""
    said = meshtune("check", recipe, "training.learning_rate=5e-5")
    assert said.code == 0, said.err
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(said.out, encoding="utf-8")
    wanted = load(Recipe, str(recipe), ["training.learning_rate=5e-5"])
    assert load(Recipe, str(resolved)) == wanted
    comments = [line for line in said.out.splitlines() if line.startswith("#")]
    text = "\n".join(comments)
    for part in ("fsdp2 on 1 rank", "global batch 4 = 4 per device", "sdpa", "first rows: ", "11 of 11 rows used"):
        assert part in text
    assert not (tmp_path / "run").exists()
    assert meshtune("check", resolved).out == said.out


def test_check_is_for_the_world_size_that_is_asked_for(meshtune: Command, recipe: Path) -> None:
    said = meshtune("check", recipe, "--nproc", 4, "distributed.dp_replicate_size=2")
    assert said.code == 0, said.err
    assert "# fsdp2 on 4 ranks: dp_replicate 2 x dp_shard 2" in said.out
    said = meshtune("check", recipe, "--nproc", 3)
    assert said.code == 2
    assert "global_batch_size: 4 cannot be shared out over 3 data-parallel ranks; write 3 or 6" in said.err


def test_check_is_of_this_machines_device(meshtune: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only an accelerator can do is no error on one."""
    asked = ("training.offload=optimizer", "training.activation_offload=true")
    assert "this machine has no accelerator" in meshtune("check", recipe, *asked).err
    monkeypatch.setattr("meshtune.recipes.inspect.own_device_type", lambda: "cuda")
    said = meshtune("check", recipe, *asked)
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.name=nowhere/at/all", "there is no folder nowhere/at/all"),
        ("data.train_path=none.jsonl", "none.jsonl"),
        ("data.validation_path=none.jsonl", "none.jsonl"),
        ("model.attention=flash_attention_2", "model.attention: flash_attention_2 cannot run"),
        (
            "training={precision: fp8, fp8: {exclude_modules: [q_projj]}, max_steps: 1, learning_rate: 1e-3}",
            "did you mean q_proj",
        ),
    ],
)
def test_check_finds_what_training_would(meshtune: Command, recipe: Path, override: str, says: str) -> None:
    said = meshtune("check", recipe, override)
    assert said.code == 2
    assert says in said.err
    assert "Traceback" not in said.err


def test_check_knows_what_a_run_folder_may_be_continued_by(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    assert meshtune("train", recipe).code == 0
    said = meshtune("check", recipe, "training.max_steps=5")
    assert said.code == 0, said.err
    assert f"# would resume from {tmp_path / 'run' / 'checkpoints' / 'step-3'}" in said.out
    assert "# changed: training.max_steps was 3, is 5" in said.out
    said = meshtune("check", recipe, "seed=1")
    assert said.code == 2
    assert "seed was 42, is 1" in said.err


# --- init -----------------------------------------------------------------------------------------------------------


def test_init_writes_a_recipe_that_loads(meshtune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = meshtune("init", "mine")
    assert said.code == 0, said.err
    assert "wrote mine.yaml; next: meshtune check mine.yaml" in said.out
    written = load(Recipe, "mine.yaml")
    assert written.checkpoint.dir == "runs/mine"
    assert Path("mine.yaml").read_text(encoding="utf-8").count("#") > 10


def test_init_overwrites_nothing(meshtune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: {name: dear}\n", encoding="utf-8")
    for name in ("mine", "mine.yaml"):
        said = meshtune("init", name)
        assert said.code == 2
        assert "mine.yaml exists already; choose another name" in said.err
    assert Path("mine.yaml").read_text(encoding="utf-8") == "model: {name: dear}\n"


def test_init_where_nothing_can_be_written(meshtune: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = meshtune("init", tmp_path / "file" / "mine")
    assert said.code == 2
    assert "Traceback" not in said.err
    assert "mine.yaml cannot be written" in said.err


# --- schema ---------------------------------------------------------------------------------------------------------


class Validator:
    """As much of JSON Schema as the recipe's schema uses; an unknown keyword is an error here, not a pass."""

    ANNOTATIONS = frozenset({"$schema", "$defs", "title", "description", "default"})
    TYPES: ClassVar[dict[str, type | tuple[type, ...]]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "integer": int,
        "number": (int, float),
    }

    def __init__(self, schema: dict[str, Any]) -> None:
        self.root = schema

    def valid(self, value: Any, schema: dict[str, Any] | bool) -> bool:
        if isinstance(schema, bool):
            return schema
        return all(self._keyword(key, schema, value) for key in schema if key not in self.ANNOTATIONS)

    def _keyword(self, key: str, schema: dict[str, Any], value: Any) -> bool:
        wanted = schema[key]
        mapping, sequence = isinstance(value, dict), isinstance(value, list)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match key:
            case "$ref":
                return self.valid(value, self.root["$defs"][wanted.rpartition("/")[2]])
            case "type":
                return any(self._is(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted))
            case "enum":
                return any(value == one and type(value) is type(one) for one in wanted)
            case "const":
                return bool(value == wanted)
            case "anyOf":
                return any(self.valid(value, one) for one in wanted)
            case "if":
                return self.valid(value, schema.get("then" if self.valid(value, wanted) else "else", True))
            case "then" | "else":
                return True
            case "properties":
                return not mapping or all(self.valid(value[k], s) for k, s in wanted.items() if k in value)
            case "additionalProperties":
                return not mapping or all(
                    self.valid(v, wanted) for k, v in value.items() if k not in schema.get("properties", {})
                )
            case "required":
                return not mapping or all(name in value for name in wanted)
            case "items":
                rest = value[len(schema.get("prefixItems", [])) :] if sequence else []
                return all(self.valid(item, wanted) for item in rest)
            case "prefixItems":
                return not sequence or all(map(self.valid, value, wanted))
            case "minItems":
                return not sequence or len(value) >= wanted
            case "maxItems":
                return not sequence or len(value) <= wanted
            case "minimum":
                return not number or value >= wanted
            case "maximum":
                return not number or value <= wanted
            case "exclusiveMinimum":
                return not number or value > wanted
            case "exclusiveMaximum":
                return not number or value < wanted
            case "pattern":
                return not isinstance(value, str) or re.search(wanted, value) is not None
        raise AssertionError(f"the schema uses {key}, which this test does not know")

    def _is(self, value: Any, name: str) -> bool:
        if isinstance(value, bool):
            return name == "boolean"
        return isinstance(value, self.TYPES[name]) or (
            name == "integer" and isinstance(value, float) and value % 1 == 0
        )


@pytest.fixture
def validator(meshtune: Command) -> Validator:
    said = meshtune("schema")
    assert said.code == 0, said.err
    return Validator(json.loads(said.out))


def values_of(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_the_examples(validator: Validator, example: Path) -> None:
    assert validator.valid(values_of(example.read_text(encoding="utf-8")), validator.root)


@pytest.mark.parametrize(
    ("old", "new"),
    [("max_steps: 3", "max_step: 3"), ("max_steps: 3", "max_steps: ten"), ("fp32", "fp7"), ("  name:", "  nam:")],
)
def test_the_schema_refuses_what_loading_refuses(validator: Validator, recipe: Path, old: str, new: str) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert validator.valid(values_of(text), validator.root)
    assert not validator.valid(values_of(text.replace(old, new, 1)), validator.root)


# --- the command itself ---------------------------------------------------------------------------------------------


def test_version(meshtune: Command) -> None:
    said = meshtune("--version")
    assert (said.code, said.out.strip()) == (0, package.__version__)


def test_help_is_quick_and_names_every_command() -> None:
    """Nobody waits for torch to read five lines. The best of three, as machines have other things to do."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "meshtune", "--help"], capture_output=True, encoding="utf-8", check=True
        )
        seconds.append(time.perf_counter() - start)
    assert all(command in done.stdout for command in ("train", "check", "export", "init", "schema"))
    assert min(seconds) < 0.7


def test_a_reader_that_stops_reading_is_no_error() -> None:
    """`meshtune schema | head -1`"""
    command = [sys.executable, "-m", "meshtune", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_command_that_does_not_exist(meshtune: Command) -> None:
    assert meshtune("trian").code == 2
