"""Transformer Engine cannot run here: in its place stands a package that checks what it is handed, and multiplies in float32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.parallel.float8 import Float8, swap

is_open: list[Any] = []


class EngineLinear(nn.Linear):
    def __init__(self, columns: int, rows: int, bias: bool, params_dtype: torch.dtype, device: str):
        super().__init__(columns, rows, bias=bias, dtype=params_dtype, device=device)
        self.given = columns, rows

    def forward(self, input: Tensor) -> Tensor:
        assert is_open and input.ndim == 2 and len(input) % 16 == 0 and input.is_contiguous()
        assert not self.weight.is_meta and tuple(self.weight.shape) == self.given[::-1]
        return super().forward(input)

    def get_extra_state(self) -> Any:
        raise AssertionError("a state that no checkpoint knows")


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
        is_open.append(recipe)
        yield
        is_open.pop()

    names = "", ".pytorch", ".common", ".common.recipe"
    modules = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    vars(modules["transformer_engine.pytorch"]).update(Linear=EngineLinear, autocast=autocast)
    vars(modules["transformer_engine.common.recipe"]).update(Float8CurrentScaling=object)


def test_layers_lend_their_weights_and_stay_what_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"a": nn.Linear(32, 48), "b": nn.Linear(48, 32, bias=False), "head": nn.Linear(32, 8)})
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(32, 48), "b": nn.Linear(48, 32, bias=False), "head": nn.Linear(32, 8)})
    swap(model, Float8(backend="transformer_engine", names=frozenset({"a", "b", "on.another.stage"})))
    assert type(model["head"]) is nn.Linear and isinstance(model["a"], nn.Linear)
    for _ in range(2):  # FSDP2 puts other parameters there for each call
        model["a"].weight = nn.Parameter(model["a"].weight.detach().clone())
        given = torch.randn(3, 5, 32)
        losses = [each["head"](each["b"](each["a"](given))).square().sum() for each in (model, plain)]
        torch.testing.assert_close(*losses)
        for each, loss in zip((model, plain), losses, strict=True):
            each.zero_grad()
            loss.backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not is_open
