"""Broken recipes, models and data: said where and what would be right, in one message, with exit code 2, before any run
folder has a metric or a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Said

Command = Callable[..., Said]


def assert_refused(said: Said, run: Path, *parts: str) -> None:
    assert said.code == 2, said.err
    assert said.err.count("meshtune: ") == 1
    assert "Traceback" not in said.err
    missing = [part for part in parts if part not in said.err]
    assert not missing, said.err
    assert not (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()


# --- the recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("learning_rate:", "learnig_rate:", ["recipe.yaml:9: training.learnig_rate", "learning_rate"]),
        ("max_steps: 3", "max_seq_length: 40", ["recipe.yaml:7: training.max_seq_length", "belongs in data"]),
        ("max_steps: 3", "max_steps: ten", ["recipe.yaml:7: training.max_steps", "ten", "an integer"]),
        ("max_steps: 3", "max_steps: 0", ["recipe.yaml:7: training.max_steps", "greater than 0"]),
        ("learning_rate: 1e-3", "learning_rate: -1", ["training.learning_rate", "greater than or equal to 0"]),
        ("precision: fp32", "precision: fp7", ["training.precision", "fp7", "bf16"]),
        (
            "precision: fp32",
            "precision: fp32\n  precision: bf16",
            ["recipe.yaml:11: training.precision", "first on line 10"],
        ),
        ("model:\n", "model:\n  dtype: bfloat16\n", ["training.precision", "weights held in bfloat16"]),
        ("model:\n", "distributed: {tp_size: 2}\nmodel:\n", ["distributed.tp_size", "start 2, or lower a size"]),
        (
            "model:\n",
            "distributed: {strategy: ddp, dp_replicate_size: 2}\nmodel:\n",
            ["distributed.dp_replicate_size", "has no effect with `strategy: ddp`"],
        ),
        (
            "model:\n",
            "distributed: {dp_replicate_size: 2}\nmodel:\n",
            [
                "distributed.dp_replicate_size: dp_replicate_size 2 needs a number of ranks that is a multiple of 2, found 1"
            ],
        ),
        (
            "global_batch_size: 4",
            "global_batch_size: 5\n  per_device_batch_size: 2",
            ["training.global_batch_size", "5 is not a multiple of per_device_batch_size 2", "write 4 or 6"],
        ),
        (
            "logging:",
            "optimizer: {name: sgd, betas: [0.9, 0.99]}\nlogging:",
            ["optimizer.betas", "has no effect with name: sgd"],
        ),
        (
            "logging:",
            "lr_scheduler: {name: cosine, warmup_steps: 1, warmup_ratio: 0.1}\nlogging:",
            ["lr_scheduler.warmup"],
        ),
        ("logging:", "checkpoint2: {}\nlogging:", ["checkpoint2", "checkpoint"]),
        ("dir:", "keep: 0\n  dir:", ["checkpoint.keep", "greater than or equal to 1"]),
        (
            "dir:",
            "resume: nowhere/checkpoints/step-4\n  dir:",
            ["checkpoint.resume: nowhere", "there is no such folder"],
        ),
        ("dir:", "dir: ${env:MESHTUNE_NO_SUCH_NAME}/x #", ["recipe.yaml:12", "MESHTUNE_NO_SUCH_NAME"]),
        ("model:\n", "base: other.yaml\nmodel:\n", ["recipe.yaml:1", "other.yaml"]),
        ("model:\n", "- model:\n", ["recipe.yaml"]),
        ("data:", "data: {", ["recipe.yaml"]),
        ("max_seq_length: 40", "max_seq_length: 65", ["data.max_seq_length: 65 is longer than the 64 positions", "64"]),
        ("max_seq_length: 40", "max_seq_length: 3\n  overlong: error", ["train.jsonl", "overlong is `error`"]),
        ("max_seq_length: 40", "drop_last: true", []),
        ("model:\n", "model:\n  attention: flash_attention_2\n", ["model.attention: flash_attention_2 cannot run"]),
        ("model:\n", "model:\n  attention: fast\n", ["recipe.yaml:2: model.attention", "fast", "sdpa"]),
    ],
)
def test_recipe(meshtune: Command, recipe: Path, tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert old in text
    text = text.replace(old, new, 1)
    if new == "drop_last: true":
        text, parts = (
            text.replace("global_batch_size: 4", "global_batch_size: 12"),
            ["11 rows make no full global batch of 12"],
        )
    recipe.write_text(text, encoding="utf-8")
    assert_refused(meshtune("train", recipe), tmp_path / "run", *parts)


def test_every_problem_is_told_at_once(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text(encoding="utf-8").replace("max_steps: 3", "max_step: 3").replace("fp32", "fp7")
    recipe.write_text(text, encoding="utf-8")
    said = meshtune("train", recipe, "optimiser.name=sgd", "data.packing=perhaps")
    assert_refused(said, tmp_path / "run", "training.max_step", "training.precision", "optimiser", "data.packing")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("training.lr=1", ["training.lr", "learning_rate"]),
        ("training.max_steps", ["training.max_steps", "="]),
        ("training.max_steps=1.5", ["training.max_steps", "1.5"]),
        ("data.train_path[3]=x", ["data.train_path"]),
    ],
)
def test_override(meshtune: Command, recipe: Path, tmp_path: Path, argument: str, parts: list[str]) -> None:
    assert_refused(meshtune("train", recipe, argument), tmp_path / "run", *parts)


def test_no_such_recipe(meshtune: Command, tmp_path: Path) -> None:
    assert_refused(meshtune("train", tmp_path / "nope.yaml"), tmp_path / "run", "nope.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    assert_refused(meshtune("train", recipe, "--device", "cuda"), tmp_path / "run", "torch sees no GPU")


def test_ranks_that_are_started_already(
    meshtune: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert_refused(meshtune("train", recipe, "--nproc", 2), tmp_path / "run", "--nproc", "torchrun already")


# --- the model ------------------------------------------------------------------------------------------------------


def absent(model: Path) -> None:
    shutil.rmtree(model)


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def config_cut(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "lla', encoding="utf-8")


def encoder(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "clip"}', encoding="utf-8")


def truncated(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def shard_missing(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    half = dict(list(weights.items())[:3])
    save_file(half, model / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    files = {name: f"model-0000{1 if name in half else 2}-of-00002.safetensors" for name in weights}
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (model / "model.safetensors").unlink()


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def without_tokenizer(model: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).unlink()


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (absent, ["model.name: there is no folder"]),
        (without_config, ["model.name", "has no config.json"]),
        (config_cut, ["model.name", "config"]),
        (encoder, ["model.name", "'clip'", "no causal language model"]),
        (truncated, ["model.safetensors is truncated", "bytes"]),
        (without_weights, ["model.name: no safetensors weights", "weights: random"]),
        (shard_missing, ["names 2 files", "missing: model-00002-of-00002.safetensors"]),
        (changed(lambda w: w.pop(Q)), [f"missing from the checkpoint: {Q}"]),
        (changed(lambda w: w.update(extra=torch.ones(2))), ["not in the model: extra", "model.allow_unexpected"]),
        (changed(lambda w: w.update({Q: torch.ones(2, 2)})), [f"{Q} has shape (2, 2) in the checkpoint and (32, 32)"]),
        (without_template, ["chat template"]),
        (without_tokenizer, ["model.tokenizer: no tokenizer could be loaded"]),
    ],
)
def test_model(
    meshtune: Command, things: Path, recipe: Path, tmp_path: Path, damage: Callable[[Path], None], parts: list[str]
) -> None:
    """C73 and its kind: nothing is initialised in silence."""
    model = tmp_path / "model"
    shutil.copytree(things / "model", model)
    damage(model)
    assert_refused(meshtune("train", recipe, f"model.name={model}"), tmp_path / "run", *parts)


# --- the data -------------------------------------------------------------------------------------------------------


def row(**columns: Any) -> str:
    return json.dumps(columns) + "\n"


GOOD = row(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["rows.jsonl"]),
        ("", ["rows.jsonl", "empty"]),
        ("{not json\n" * 3, ["rows.jsonl", "JSON"]),
        (row(conversations=[]) * 2, ["rows.jsonl:1", "`conversations` is not a list of messages", "an empty list"]),
        (row(dialog=[]) * 2, ["dialog", "messages", "conversations", "text"]),
        (row(messages=[{"role": "user", "content": "a"}]) * 2, ["rows.jsonl", "no message has the role assistant"]),
        (row(messages="no list") * 2, ["rows.jsonl"]),
    ],
)
def test_data(meshtune: Command, recipe: Path, tmp_path: Path, content: str | None, parts: list[str]) -> None:
    """C20, C22: with the file and what would be right, within seconds."""
    data = tmp_path / "rows.jsonl"
    if content is not None:
        data.write_text(content, encoding="utf-8")
    assert_refused(meshtune("train", recipe, f"data.train_path={data}"), tmp_path / "run", *parts)


def test_some_unusable_rows_are_counted_and_named(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(GOOD * 4 + "{not json\n" + GOOD * 4, encoding="utf-8")
    said = meshtune("train", recipe, f"data.train_path={data}")
    assert said.code == 0, said.err
    assert "8 of 9 rows used" in said.out
    assert "1 rows unusable" in said.out
    assert "rows.jsonl:5" in said.out


def test_validation_data(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    said = meshtune("train", recipe, f"data.validation_path={tmp_path / 'none.jsonl'}")
    assert_refused(said, tmp_path / "run", "none.jsonl")


# --- the run folder -------------------------------------------------------------------------------------------------


def test_a_run_folder_that_cannot_be(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    said = meshtune("train", recipe, f"checkpoint.dir={tmp_path / 'file' / 'run'}")
    assert_refused(said, tmp_path / "run", "checkpoint.dir: the run folder", "cannot be written")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


def test_a_run_folder_that_is_in_use(
    meshtune: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtune.checkpoint import lock

    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    (tmp_path / "run").mkdir()
    with lock.RunLock(tmp_path / "run"):
        said = meshtune("train", recipe)
    assert_refused(said, tmp_path / "run", "is in use by another run (process")


def test_a_disk_without_room(meshtune: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C71: found out before the first step."""
    from meshtune.checkpoint import checkpoint

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    assert_refused(meshtune("train", recipe), tmp_path / "run", "one checkpoint needs about", "has 1 bytes free")
