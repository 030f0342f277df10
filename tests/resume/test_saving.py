"""What is written into a checkpoint and read from it, and what a full disk leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshtune.checkpoint import folder
from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.checkpoint.space import check_space
from meshtune.checkpoint.state import model_state
from meshtune.errors import CheckpointError
from tests.ranks import Ranks
from tests.resume.conftest import Bench
from tests.resume.faults import train_on_a_full_disk
from tests.resume.runs import checkpoint, lines, tensors

# --- what is in a checkpoint ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two names for one tensor, a buffer that is replaced, and a parameter that no gradient reaches."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("load", torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def trained(seed: int, width: int = 4, **constants: float) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), **constants)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load = torch.arange(4.0) + seed
    return model, optimizer


def save_and_load(run: str) -> dict[str, Any]:
    model, optimizer = trained(0, lr=0.1, weight_decay=0.1)
    path = Checkpointer(Path(run), model, optimizer, 3).save(1, {})
    other = Net()
    new = torch.optim.AdamW(other.parameters(), lr=0.2, weight_decay=0.3)
    Checkpointer(Path(run), other, new, 3).load(path)
    return {
        "names": set(tensors(path)),
        "equal": all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items()),
        "moments": new.state[other.embedding.weight]["exp_avg"].equal(
            optimizer.state[model.embedding.weight]["exp_avg"]
        ),
        "step": float(new.state[other.embedding.weight]["step"]),
        "tied": other.head.weight is other.embedding.weight,
        "unused_has_moments": other.unused.weight in new.state,
        "constants": [(group["lr"], group["weight_decay"]) for group in new.param_groups],
    }


def test_what_a_checkpoint_holds(ranks: Ranks, tmp_path: Path) -> None:
    """C62, C65: a tied tensor once, and tied again; live buffers; moments where there are some; no constants, so that a
    changed weight decay counts."""
    found = ranks.call(1, save_and_load, str(tmp_path))[0]
    moments = {f"optimizer.embedding.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    unused = {"model.unused.weight", "model.unused.bias"}
    assert found.pop("names") == {"model.embedding.weight", "model.load", *unused, *moments}
    assert found == {
        "equal": True,
        "moments": True,
        "step": 1.0,
        "tied": True,
        "unused_has_moments": False,
        "constants": [(0.2, 0.3)],
    }


def load_into_another(run: str, width: int, optimizer: str) -> str:
    model, adamw = trained(0, lr=0.1)
    path = Checkpointer(Path(run), model, adamw, 3).save(1, {})
    other = Net(width)
    new = (
        torch.optim.SGD(other.parameters(), momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(other.parameters())
    )
    try:
        Checkpointer(Path(run), other, new, 3).load(path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("width", "optimizer", "says"),
    [
        (
            6,
            "adamw",
            "model.embedding.weight is torch.float32 (8, 4) in the checkpoint, torch.float32 (8, 6) in this run",
        ),
        (4, "sgd", "optimizer.embedding.weight.momentum_buffer is not in the checkpoint"),
        (4, "sgd", "optimizer.embedding.weight.exp_avg_sq is in the checkpoint only"),
    ],
)
def test_what_does_not_fit_is_named(ranks: Ranks, tmp_path: Path, width: int, optimizer: str, says: str) -> None:
    """C73: nothing keeps the value that it was made with in silence."""
    assert says in ranks.call(1, load_into_another, str(tmp_path), width, optimizer)[0]


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [(2, {"distributed": {"strategy": "ddp"}}), (2, {}), (1, {"training": {"activation_checkpointing": "full"}})],
)
def test_names_are_those_of_the_model(bench: Bench, world_size: int, changes: dict[str, Any]) -> None:
    """C75: whatever wraps the model, a checkpoint's names are those that transformers knows."""
    recipe = bench.recipe(bench.model("qwen3"), **changes)
    recipe["training"]["max_steps"] = 3
    assert bench.train(recipe, world_size).error is None
    model = AutoModelForCausalLM.from_pretrained(bench.model("qwen3"))
    stored = tensors(checkpoint(Path(recipe["checkpoint"]["dir"]), 3))
    parameters = {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in parameters  # tied
    assert {name[6:] for name in stored if name.startswith("model.")} == parameters
    assert {name[10:].rpartition(".")[0] for name in stored if name.startswith("optimizer.")} == parameters
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() for name, t in stored.items() if name.startswith("model.")) == count


def test_names_of_compiled_blocks() -> None:
    """C75: `torch.compile` on a block leaves its names as they are."""
    model = Net()
    names = set(model_state(model))
    model.unused.compile(backend="eager")
    model(torch.arange(8))
    assert set(model_state(model)) == names


# --- a disk that is full --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_leaves_the_checkpoint_before(bench: Bench, rank: int) -> None:
    """C71: the second save fails on one rank; both ranks say so, the first checkpoint stays although only one is kept,
    and the same command continues from it."""
    recipe = bench.recipe(bench.model("qwen3"), checkpoint={"every_steps": 4, "keep": 1})
    run = Path(recipe["checkpoint"]["dir"])
    outcomes = bench.ranks.call(2, train_on_a_full_disk, recipe, bench.cache, rank, "step-8")
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.shared
        assert f"{checkpoint(run, 8)} could not be written: rank {rank}: [Errno 28] No space left" in outcome.error
        assert "bytes free" in outcome.error
    assert os.listdir(run / "checkpoints") == ["step-4"]
    assert folder.newest(run) is not None
    assert bench.train(recipe, world_size=1).error is None
    assert [row["step"] for row in lines(run)] == list(range(1, 11))
    assert os.listdir(run / "checkpoints") == ["step-10"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 700 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)]
    if (
        sys.platform != "linux"
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_really_full(bench: Bench, small_disk: Path) -> None:
    """C71: the system's own error comes through, and room is made again."""
    recipe = bench.recipe(bench.model("qwen3"), run=small_disk / "run", checkpoint={"every_steps": 1})
    for outcome in bench.outcomes(recipe, world_size=2):
        assert outcome.error is not None
        assert "No space left on device" in outcome.error
    newest = folder.newest(small_disk / "run")
    assert newest is not None
    assert newest.step >= 1
    assert not list((small_disk / "run" / "checkpoints").glob(".*"))


def test_space_is_looked_at_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"needs about 1,125,899,906,842,624 bytes, but the disk of .* bytes free"
    ):
        check_space(tmp_path, 1 << 50)
    check_space(tmp_path, 1)
