"""`training.compile` is effective for every block, or an error: never a block that runs uncompiled in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit

from meshtune.errors import ModelError
from meshtune.parallel import compile as compile_room
from meshtune.parallel.compile import compile_units


class Block(nn.Module):
    """Each has a number of its own, which torch takes as constant: one variant of the code for each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


@pytest.fixture
def captured_only() -> Iterator[None]:
    """The backend that runs what was captured as it is, and torch's own limits afterwards."""
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
        yield
    torch.compiler.set_default_backend(before)
    torch._dynamo.reset()


@pytest.mark.usefixtures("captured_only")
def test_many_variants_of_a_block_are_all_compiled() -> None:
    """torch's own limit of 8 would leave the other blocks uncompiled."""
    torch._dynamo.utils.counters.clear()
    blocks = [Block(number) for number in range(2, 22)]
    compile_units(blocks, "cpu")
    checks = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for block in blocks:
        block(torch.ones(3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - checks == len(blocks)


@pytest.mark.usefixtures("captured_only")
def test_a_variant_too_many_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_room, "_VARIANTS", 3)
    blocks = [Block(number) for number in range(2, 8)]
    compile_units(blocks, "cpu")
    with pytest.raises(FailOnRecompileLimitHit):
        for block in blocks:
            block(torch.ones(3))


def test_a_compiler_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_args: object, **_kwargs: object) -> object:
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.raises(ModelError, match=r"training\.compile: .*no C\+\+ compiler\).*compile: false"):
        compile_units([Block(2)], "cpu")
