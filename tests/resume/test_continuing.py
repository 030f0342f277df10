"""What a run folder may be continued by, what is said of it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conversations import make_conversations, write_jsonl
from tests.resume.conftest import Bench
from tests.resume.runs import checkpoint, lines, losses


def stopped(bench: Bench, after: int = 4, **changes: Any) -> dict[str, Any]:
    """A recipe whose run folder holds a checkpoint."""
    recipe = bench.recipe(bench.model("llama"), **changes)
    assert bench.train(recipe, stop_after=after).stopped_after == after
    return recipe


def folder_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"])


def with_(recipe: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {**recipe, section: {**recipe[section], name: value}} if section else {**recipe, name: value}


@pytest.fixture(scope="module")
def begun(bench: Bench) -> dict[str, Any]:
    return stopped(bench)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", 43, "seed was 42, is 43"),
        ("data.shuffle", False, "data.shuffle was True, is False"),
        ("data.packing", True, "data.packing was False, is True"),
        ("data.drop_last", True, "data.drop_last was False, is True"),
        ("optimizer.name", "sgd", "optimizer.name was 'adamw', is 'sgd'"),
    ],
)
def test_what_would_make_another_run_is_refused(
    bench: Bench, begun: dict[str, Any], key: str, value: Any, says: str
) -> None:
    """Named with what it was; the run folder stays as it is."""
    folder = folder_of(begun)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    error = bench.train(with_(begun, key, value)).error
    assert error is not None
    assert says in error
    assert "or name another checkpoint.dir" in error
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"} == before


def test_other_data_is_refused(bench: Bench, tmp_path: Path) -> None:
    """The file is still called the same; its rows are others."""
    data = write_jsonl(tmp_path / "rows.jsonl", make_conversations(23, seed=0))
    recipe = stopped(bench, data={"train_path": str(data)})
    write_jsonl(data, make_conversations(23, seed=9))
    error = bench.train(recipe).error
    assert error is not None
    assert "was trained on other data (its rows, tokenizer or lengths have changed since)" in error


def test_another_tokenizer_is_refused(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(bench.model("llama"), model)
    recipe = stopped(bench, model={"name": str(model)})
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (model / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    error = bench.train(recipe).error
    assert error is not None
    assert "its rows, tokenizer or lengths have changed" in error


def test_the_same_rows_from_another_place_are_welcome(bench: Bench, tmp_path: Path) -> None:
    """A run folder moves between machines with its data."""
    recipe = stopped(bench)
    moved = shutil.copy(bench.train_path, tmp_path / "moved.jsonl")
    assert bench.train(with_(recipe, "data.train_path", str(moved))).error is None


def test_changes_of_the_course_are_said(bench: Bench) -> None:
    """C45: a longer run and another learning rate go on, and the user reads what has changed."""
    recipe = stopped(bench)
    changed = with_(with_(recipe, "training.max_steps", 12), "training.learning_rate", 0.01)
    outcome = bench.train(changed)
    assert outcome.error is None
    assert "changed     training.max_steps was 10, is 12" in outcome.said
    assert "changed     training.learning_rate was 0.02, is 0.01" in outcome.said
    assert max(losses(folder_of(recipe))) == 12


def test_a_finished_run_has_nothing_to_do(bench: Bench) -> None:
    """No step, no validation, no save; the report is there again, and more steps can be asked for."""
    changes = {"data": {"validation_path": str(bench.validation_path)}, "checkpoint": {"export": "final"}}
    recipe = bench.recipe(bench.model("llama"), **changes)
    bench.train(recipe)
    folder = folder_of(recipe)
    metrics, saved = (folder / "metrics.jsonl").read_bytes(), (checkpoint(folder, 10) / "manifest.json").stat()
    (folder / "report.html").unlink()
    outcome = bench.train(recipe)
    assert outcome.error is None
    assert f"nothing to do: {folder} has 10 steps already, and the recipe asks for 10" in outcome.said
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert (checkpoint(folder, 10) / "manifest.json").stat() == saved
    assert (folder / "report.html").is_file()
    assert (folder / "export" / "model.safetensors").is_file()
    assert bench.train(with_(recipe, "training.max_steps", 12)).error is None
    assert max(losses(folder)) == 12


def test_never_refuses_a_folder_with_checkpoints(bench: Bench, begun: dict[str, Any]) -> None:
    error = bench.train(with_(begun, "checkpoint.resume", "never")).error
    assert error is not None
    assert f"checkpoint.resume: never, but {folder_of(begun)} holds checkpoints up to step 4" in error


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("step-3", "is not a complete checkpoint: there is no such folder"),
        ("", "is a run folder; name one of its checkpoints: "),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(bench: Bench, begun: dict[str, Any], name: str, says: str) -> None:
    path = folder_of(begun) / "checkpoints" / name if name else folder_of(begun)
    error = bench.train(with_(begun, "checkpoint.resume", str(path))).error
    assert error is not None
    assert error.startswith("CheckpointError: checkpoint.resume: ")
    assert says in error


def test_a_partial_checkpoint_is_passed_over_and_refused_by_name(bench: Bench) -> None:
    """C70: automatic resume takes the complete one before it and says so; asked for by path, it is an error."""
    recipe = stopped(bench, checkpoint={"every_steps": 2})
    folder = folder_of(recipe)
    next(checkpoint(folder, 4).glob("*.distcp")).unlink()
    error = bench.train(with_(recipe, "checkpoint.resume", str(checkpoint(folder, 4)))).error
    assert error is not None
    assert "step-4 is not a complete checkpoint: __0_0.distcp is missing" in error
    outcome = bench.train(recipe)
    assert outcome.error is None
    assert f"resuming    from {checkpoint(folder, 2)}, after step 2" in outcome.said
    assert f"passed over {checkpoint(folder, 4)} is not a complete checkpoint" in outcome.said
    assert [row["step"] for row in lines(folder)] == list(range(1, 11))


def test_only_damaged_checkpoints_are_no_reason_to_start_anew_in_silence(bench: Bench) -> None:
    recipe = stopped(bench)
    (checkpoint(folder_of(recipe), 4) / "manifest.json").unlink()
    error = bench.train(recipe).error
    assert error is not None
    assert "no complete checkpoint to resume from" in error


def test_going_back_to_an_earlier_step(bench: Bench) -> None:
    """A path is followed whatever is newer; the course is the same again, and what it replaces is set aside."""
    recipe = bench.recipe(bench.model("llama"), checkpoint={"every_steps": 2, "keep": None})
    bench.train(recipe)
    folder = folder_of(recipe)
    before = lines(folder)
    back = with_(with_(recipe, "checkpoint.resume", str(checkpoint(folder, 4))), "checkpoint.keep", 1)
    outcome = bench.train(back)
    assert outcome.error is None
    assert f"set aside as {folder / 'checkpoints' / '.step-10.superseded'}" in outcome.said
    assert lines(folder) == before
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-10"]


def test_a_new_folder_may_start_from_a_checkpoint_of_another(bench: Bench, begun: dict[str, Any]) -> None:
    new = bench.recipe(bench.model("llama"), checkpoint={"resume": str(checkpoint(folder_of(begun), 4))})
    assert bench.train(new).error is None
    assert [row["step"] for row in lines(folder_of(new))] == list(range(5, 11))
