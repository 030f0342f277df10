"""`meshtune export`: an untrained model comes out as it went in, tensor for tensor; anything else is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Said, write_recipe
from tests.parity.conversations import make_tokenizer
from tests.parity.models import save_model

Command = Callable[..., Said]


def rewrite(model: Path, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Give the stored tensors other dtypes, and the config the one of most of them."""
    weights = load_file(model / "model.safetensors")
    weights = {name: tensor.to(dtype_of(name)) for name, tensor in weights.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(dtype_of("")).removeprefix("torch.")
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")


def in_bf16(_: str) -> torch.dtype:
    return torch.bfloat16


def norms_in_fp32(name: str) -> torch.dtype:
    return torch.float32 if "norm" in name else torch.bfloat16


def in_fp32(_: str) -> torch.dtype:
    return torch.float32


@pytest.mark.parametrize(
    ("architecture", "dtype_of"),
    [
        ("llama", in_fp32),  # an untied head, biases
        ("llama", norms_in_fp32),
        ("qwen3", in_bf16),  # tied
        ("qwen3_moe", in_bf16),  # one tensor an expert in the file, all experts in one in the model
        ("mixtral", in_fp32),
        ("gpt2", in_bf16),
    ],
)
def test_an_untrained_round_trip_is_bit_identical(
    meshtune: Command, recipe: Path, tmp_path: Path, architecture: str, dtype_of: Callable[[str], torch.dtype]
) -> None:
    """At a learning rate of zero: the file of the run's own export, and that of a checkpoint, hold the same bytes."""
    model = save_model(tmp_path / "model", architecture, make_tokenizer())
    rewrite(model, dtype_of)
    settings = [f"model.name={model}", "training.learning_rate=0", "training.max_steps=1", "lr_scheduler.name=constant"]
    said = meshtune("train", recipe, *settings, "optimizer.weight_decay=0.1")
    assert said.code == 0, said.err
    said = meshtune("export", tmp_path / "run", "--step", 1, "--to", tmp_path / "exported")
    assert said.code == 0, said.err
    assert f"exported {tmp_path / 'run' / 'checkpoints' / 'step-1'} to {tmp_path / 'exported'}" in said.out
    wanted = load_file(model / "model.safetensors")
    for folder in (tmp_path / "run" / "export", tmp_path / "exported"):
        found = load_file(folder / "model.safetensors")
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert AutoTokenizer.from_pretrained(folder).chat_template == make_tokenizer().chat_template
    logits = [
        AutoModelForCausalLM.from_pretrained(folder)(torch.arange(4, 20)[None]).logits
        for folder in (model, tmp_path / "exported")
    ]
    assert torch.equal(*logits)


@pytest.fixture(scope="module")
def trained(meshtune: Command, things: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 to 3."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, things)
    said = meshtune("train", recipe, "checkpoint.every_steps=1", "checkpoint.export=none")
    assert said.code == 0, said.err
    return folder / "run"


def test_a_step_and_a_dtype(meshtune: Command, trained: Path, tmp_path: Path) -> None:
    """The newest checkpoint if none is named; any dtype, of any step."""
    assert meshtune("export", trained, "--to", tmp_path / "a").code == 0
    assert meshtune("export", trained, "--to", tmp_path / "b", "--step", 3).code == 0
    assert meshtune("export", trained, "--to", tmp_path / "c", "--step", 1, "--dtype", "bfloat16").code == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert {t.dtype for t in c.values()} == {torch.bfloat16}
    assert not all(torch.equal(a[name].bfloat16(), c[name]) for name in a)
    config = json.loads((tmp_path / "c" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16"


def test_an_export_takes_the_place_of_an_export(meshtune: Command, trained: Path, tmp_path: Path) -> None:
    assert meshtune("export", trained, "--to", tmp_path / "out", "--step", 1).code == 0
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert meshtune("export", trained, "--to", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != first
    assert not list(tmp_path.glob(".*"))


def occupied(to: Path) -> None:
    to.mkdir()
    (to / "thesis.tex").write_text("dear", encoding="utf-8")


def a_file(to: Path) -> None:
    to.write_text("dear", encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--step", 7], "has no checkpoint of step 7; complete ones: 1, 2, 3"),
        (["--step", "best"], "run has no best checkpoint, which only a run with checkpoint.best_metric keeps"),
        (["--step", "best"], "name the step of a complete one: 1, 2, 3"),
        (["--step", "last"], "--step last: wanted the number of a step, or best"),
        (["--step=-1"], "--step -1: wanted the number of a step, or best"),
        (["--dtype", "fp32"], "--dtype fp32: wanted one of float32, bfloat16, float16"),
    ],
)
def test_what_cannot_be_exported(
    meshtune: Command, trained: Path, tmp_path: Path, arguments: list[Any], says: str
) -> None:
    said = meshtune("export", trained, "--to", tmp_path / "out", *arguments)
    assert said.code == 2
    assert says in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("occupy", [occupied, a_file])
def test_a_target_that_is_something_else(
    meshtune: Command, trained: Path, tmp_path: Path, occupy: Callable[[Path], None]
) -> None:
    """Nothing of the user's is replaced."""
    to = tmp_path / "out"
    occupy(to)
    said = meshtune("export", trained, "--to", to)
    assert said.code == 2
    assert f"--to {to} exists and is not a model folder" in said.err
    assert next(iter(to.iterdir()) if to.is_dir() else iter([to])).read_text(encoding="utf-8") == "dear"


def test_the_model_that_the_run_started_from_is_not_replaced(meshtune: Command, things: Path, trained: Path) -> None:
    said = meshtune("export", trained, "--to", things / "model")
    assert said.code == 2
    assert "is the model that the run started from" in said.err


def test_a_target_that_cannot_be_written(meshtune: Command, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("dear", encoding="utf-8")
    said = meshtune("export", trained, "--to", tmp_path / "file" / "out")
    assert said.code == 2
    assert "cannot be written" in said.err
    assert "Traceback" not in said.err


def test_what_is_no_run_folder(meshtune: Command, tmp_path: Path) -> None:
    said = meshtune("export", tmp_path, "--to", tmp_path / "out")
    assert said.code == 2
    assert "is not a run folder: it has no recipe.resolved.yaml" in said.err


def test_a_damaged_checkpoint(meshtune: Command, trained: Path, tmp_path: Path) -> None:
    """C70: by step it is refused; the newest complete one is the step before."""
    trained = Path(shutil.copytree(trained, tmp_path / "run"))
    next((trained / "checkpoints" / "step-3").glob("*.distcp")).unlink()
    said = meshtune("export", trained, "--to", tmp_path / "out", "--step", 3)
    assert said.code == 2
    assert "step-3 is not a complete checkpoint" in said.err
    assert "step-2" in meshtune("export", trained, "--to", tmp_path / "out").out


def test_a_changed_byte(meshtune: Command, trained: Path, tmp_path: Path) -> None:
    """As a file that is missing: by step it is refused, and named; without one the step before is taken, and that is said."""
    trained = Path(shutil.copytree(trained, tmp_path / "run"))
    file = next((trained / "checkpoints" / "step-3").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = meshtune("export", trained, "--to", tmp_path / "out", "--step", 3)
    assert said.code == 2 and f"step-3 is damaged: {file.name} does not hold what was written" in said.err
    said = meshtune("export", trained, "--to", tmp_path / "out")
    assert said.code == 0
    assert f"exported {trained / 'checkpoints' / 'step-2'} to" in said.out
    assert f"passed over {trained / 'checkpoints' / 'step-3'} is damaged: {file.name}" in said.out


BEST = ("training.eval_every_steps=1", "checkpoint.best_metric=validation_loss", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def judged(meshtune: Command, things: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose best checkpoint is that of step 1: a step that is far too long makes the model worse, and so on."""
    folder = tmp_path_factory.mktemp("judged")
    recipe = write_recipe(folder, things)
    settings = (f"data.validation_path={things / 'validation.jsonl'}", "training.learning_rate=1.0", *BEST)
    said = meshtune("train", recipe, *settings, "checkpoint.export=best", "lr_scheduler.name=constant")
    assert said.code == 0, said.err
    best = json.loads((folder / "run" / "checkpoints" / "best.json").read_text(encoding="utf-8"))
    assert best["step"] < 3, "or this fixture shows nothing"
    return folder / "run"


def test_the_best_checkpoint_is_exported_by_that_name(meshtune: Command, judged: Path, tmp_path: Path) -> None:
    step = json.loads((judged / "checkpoints" / "best.json").read_text(encoding="utf-8"))["step"]
    for name, arguments in {"best": ("--step", "best"), "number": ("--step", step), "newest": ()}.items():
        assert meshtune("export", judged, "--to", tmp_path / name, *arguments).code == 0
    best, number, newest = (load_file(tmp_path / n / "model.safetensors") for n in ("best", "number", "newest"))
    assert all(torch.equal(best[name], number[name]) for name in best)
    assert not all(torch.equal(best[name], newest[name]) for name in best)


def test_a_run_exports_its_best_weights_where_asked(meshtune: Command, judged: Path, tmp_path: Path) -> None:
    assert meshtune("export", judged, "--to", tmp_path / "best", "--step", "best").code == 0
    wanted = load_file(tmp_path / "best" / "model.safetensors")
    found = load_file(judged / "export" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_pointer_that_is_damaged(meshtune: Command, judged: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(judged, tmp_path / "run"))
    (run / "checkpoints" / "best.json").write_text('{"step": ', encoding="utf-8")
    said = meshtune("export", run, "--to", tmp_path / "out", "--step", "best")
    assert said.code == 2 and "best.json cannot be read" in said.err and "Traceback" not in said.err
    (run / "checkpoints" / "best.json").write_text('{"step": 7, "metric": "x", "value": 1}', encoding="utf-8")
    said = meshtune("export", run, "--to", tmp_path / "out", "--step", "best")
    assert said.code == 2 and "has no checkpoint of step 7; complete ones:" in said.err
