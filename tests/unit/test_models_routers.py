"""The load-balancing loss that a config asks for is the one that the architecture computes, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from meshtune.errors import ModelError
from meshtune.models.routers import balancing, disproof
from tests.unit.models_tiny import tiny_model

ROW = torch.arange(5, 28)


def asking(name: str, **changes: object) -> PreTrainedModel:
    return tiny_model(name, output_router_logits=True, **changes)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_what_is_declared_is_what_the_architecture_computes(name: str) -> None:
    model = asking(name, router_aux_loss_coef=0.25)
    declared = balancing(model)
    assert declared is not None
    assert (declared.experts, declared.top_k, declared.coefficient) == (4, 2, 0.25)
    assert len(declared.routers) == 2 and set(declared.routers.values()) == {0}
    assert disproof(model, ROW) is None


def test_only_a_config_that_asks_for_balance_gets_it() -> None:
    assert balancing(tiny_model("mixtral")) is None
    assert balancing(asking("mixtral", router_aux_loss_coef=0.0)) is None


def test_an_architecture_without_such_a_loss_is_refused() -> None:
    with pytest.raises(ModelError, match=r"output_router_logits.*has no router_aux_loss_coef; set it to false"):
        balancing(asking("deepseek_v3"))


def test_another_loss_than_the_declared_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = asking("mixtral", router_aux_loss_coef=0.25)
    plain = type(model).forward

    def changed(key: str, value: Callable[[Any], object]) -> str:
        def forward(self: PreTrainedModel, **inputs: object) -> object:
            output = plain(self, **inputs)
            if output.aux_loss is not None:
                setattr(output, key, value(output))
            return output

        monkeypatch.setattr(type(model), "forward", forward)
        return disproof(model, ROW) or ""

    assert changed("loss", lambda output: output.loss) == ""
    assert "to the loss, not 0.25 of" in changed("loss", lambda output: output.loss + 0.01)
    assert "its router logits" in changed("aux_loss", lambda output: 2 * output.aux_loss)
    assert changed("aux_loss", lambda output: None) == "its forward computes none"
