"""`model.add_tokens`: tokens that the tokenizer has not are learnt, and go out with adapter and model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Said
from tests.parity.conversations import make_tokenizer
from tests.parity.models import save_model

Command = Callable[..., Said]
TOKEN = "<tool>"


@pytest.fixture
def asked(recipe: Path, tmp_path: Path) -> list[str]:
    """A model with two rows to spare, and rows of text with a token that its tokenizer has not."""
    tokenizer = make_tokenizer()
    model = save_model(tmp_path / "model", "qwen3", tokenizer, vocab_size=len(tokenizer) + 2)
    rows = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": f"a {TOKEN} b"}, {"role": "assistant", "content": f"b{TOKEN} a{TOKEN}"}]
    rows.write_text(f"{json.dumps({'messages': said})}\n" * 12, encoding="utf-8")
    return [str(recipe), f"model.name={model}", f"data.train_path={rows}", "training.learning_rate=0.05"]


def test_a_new_token_is_learnt_and_exported(meshtune: Command, asked: list[str], tmp_path: Path) -> None:
    peft = ["peft.r=2", f"peft.trainable_token_indices=['{TOKEN}']"]
    said = meshtune("train", *asked, f"model.add_tokens=['{TOKEN}']", *peft)
    assert said.code == 0, said.err
    folder = tmp_path / "run" / "export"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    index = len(make_tokenizer())
    assert tokenizer(TOKEN, add_special_tokens=False)["input_ids"] == [index]
    (row,) = (
        t
        for name, t in load_file(folder / "adapter_model.safetensors").items()
        if "token_adapter" in name or "tokens" in name
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = base.get_input_embeddings().weight.detach()
    assert row.shape == (1, before.shape[1]) and (row[0] - before[index]).abs().max() > 1e-3
    merged = tmp_path / "merged"
    assert meshtune("export", tmp_path / "run", "--to", merged, "--merge").code == 0
    after = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).get_input_embeddings().weight
    assert torch.equal(after[index], row[0]) and torch.equal(after[:index], before[:index])
    assert len(AutoTokenizer.from_pretrained(merged)) == index + 1


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            ["model.add_tokens=['<a>', '<b>', '<c>']"],
            ["model.add_tokens", "none of them for '<c>'", "resize_token_embeddings"],
        ),
        ([f"model.add_tokens=['{make_tokenizer().eos_token}']"], ["model.add_tokens", "already; leave them out"]),
        (["model.add_tokens=['<a>']", "peft.r=2"], ["model.add_tokens", "peft.trainable_token_indices"]),
    ],
)
def test_what_cannot_be_added(meshtune: Command, asked: list[str], settings: list[str], parts: list[str]) -> None:
    said = meshtune("check", *asked, *settings)
    assert said.code == 2 and all(part in said.err for part in parts), said.err
