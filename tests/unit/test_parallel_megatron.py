"""What keeps `strategy: megatron_fsdp` from running is said before any weight is read."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest.mock import patch

import pytest

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.layout import DistributedSection, Layout
from meshtune.parallel.megatron import problems

STRATEGY = {"strategy": "megatron_fsdp"}


def found(device: str, installed: bool) -> list[str]:
    layout = Layout.resolve(DistributedSection(**STRATEGY), 2, device)
    with patch.object(importlib.util, "find_spec", return_value=object() if installed else None):
        return [message for _, message in problems(layout)]


def test_the_package_and_a_cuda_device_are_needed() -> None:
    assert found("cuda", installed=True) == []
    (no_package,) = found("cuda", installed=False)
    assert "pip install 'meshtune[megatron-fsdp]'" in no_package
    (no_device,) = found("cpu", installed=True)
    assert "CUDA devices, found cpu" in no_device


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "ep_size", "dp_replicate_size"])
def test_axes_that_it_does_not_take_are_refused_by_the_recipe(axis: str) -> None:
    values: dict[str, Any] = {**STRATEGY, axis: 2}
    with pytest.raises(RecipeError, match=rf"{axis}.*needs `strategy: fsdp2`"):
        from_mapping(DistributedSection, values)


def test_sequences_may_be_cut() -> None:
    assert Layout.resolve(from_mapping(DistributedSection, {**STRATEGY, "cp_size": 2}), 4).size("fsdp") == 4
