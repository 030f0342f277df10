"""kill -9 before each single thing that a save does to the disk: what was complete stays so, and nothing passes for complete."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.checkpoint import folder
from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.checkpoint.loading import load_weights
from tests.resume.processes import PRELOADED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills with SIGKILL")

# What Python tells its audit hooks before it does it (docs.python.org/3/library/audit_events.html).
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def make(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose every weight is `value`, and an optimizer that has made a step of nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, optimizer


def touches(run: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event is about the run folder: by its path, or, where a tree is removed, by a name in a folder that is open."""
    path, rest = arguments[0], arguments[1:]
    if not isinstance(path, str | os.PathLike):
        return False
    return str(path).startswith(run) or (
        not os.path.isabs(path) and bool(rest) and isinstance(rest[-1], int) and rest[-1] > 0
    )


def save(run: str, step: int, value: float, asynchronous: bool, die_before: int) -> None:
    """Save a checkpoint, and die before doing thing number `die_before` to the run folder."""
    import torch.distributed as dist

    from meshtune.layout.world import background_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    group = background_group() if asynchronous else None
    keeper = Checkpointer(Path(run), *make(value), 1, group)
    done = count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and touches(run, arguments) and next(done) == die_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    keeper.save(step, {}, folder.Best(step, "validation_loss", value))
    keeper.finish()
    os._exit(0)


def attempts(run: Path, step: int, value: float, asynchronous: bool) -> Iterator[int]:
    """Save again and again, each time from the same start, dying one thing later, until a save gets through; the number of each
    attempt. Between them the run folder is what the death has left."""
    start = run.with_name("start")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for die_before in count(1):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(start, run)
        process = context.Process(target=save, args=(str(run), step, value, asynchronous, die_before))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        yield die_before
        if process.exitcode == 0:
            return


def value_of(path: Path) -> float:
    """The value that every weight of a checkpoint has."""
    model, _ = make(0.0)
    load_weights(path, model)
    values: set[float] = {float(v) for tensor in model.state_dict().values() for v in flat(tensor)}
    (value,) = values
    return value


def flat(tensor: Tensor) -> list[float]:
    return tensor.flatten().tolist()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of which `start` beside it is what each attempt starts from: step 1, all ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    (tmp_path / "start").mkdir()
    process = context.Process(target=save, args=(str(tmp_path / "start"), 1, 1.0, False, 0))
    process.start()
    process.join(60)
    assert folder.newest(tmp_path / "start") is not None
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("step", "asynchronous"), [(2, True), (1, False)], ids=["next", "again"])
def test_a_death_before_each_of_them(run: Path, step: int, asynchronous: bool) -> None:
    """The next step, or the same one again, as after going back. The checkpoint before or the new one is complete and whole,
    whichever the best one is named as is there, and the next start leaves nothing half-written."""
    seen, deaths = set(), 0
    for _ in attempts(run, step, 2.0, asynchronous):
        deaths += 1
        assert not folder.survey(run)[1]
        folder.sweep(run)
        complete = folder.checkpoints(run)
        assert complete and not list((run / "checkpoints").glob(".*"))
        best = (run / "checkpoints" / folder.BEST).read_text(encoding="utf-8")
        assert any(f'"{c.path.name}"' in best for c in complete)
        for found in complete:
            value = value_of(found.path)
            assert value == found.step if step == 2 else value in (1.0, 2.0)
            seen.add(value)
        folder.retain(run, 1, folder.Best(complete[-1].step, "validation_loss", 0.0))
        assert folder.checkpoints(run) == [complete[-1]]
    assert deaths > 15
    assert seen == {1.0, 2.0}
    assert value_of(run / "checkpoints" / f"step-{step}") == 2.0
