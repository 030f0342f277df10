"""The learning-rate schedules: transformers' formulas, and every zero a value."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import optimization

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.optim.schedule import LRSchedulerSection

TRANSFORMERS: dict[str, Callable[..., Any]] = {
    "constant": lambda o, w, t, d, m: optimization.get_constant_schedule_with_warmup(o, w),
    "linear": lambda o, w, t, d, m: optimization.get_linear_schedule_with_warmup(o, w, t),
    "cosine": lambda o, w, t, d, m: optimization.get_cosine_schedule_with_warmup(o, w, t),
    "inverse_sqrt": lambda o, w, t, d, m: optimization.get_inverse_sqrt_schedule(o, w),
    "wsd": lambda o, w, t, d, m: optimization.get_wsd_schedule(o, w, d, t, min_lr_ratio=m),
}


def theirs(name: str, warmup: int, total: int, decay: int = 0, floor: float = 0.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    factor = TRANSFORMERS[name](optimizer, warmup, total, decay, floor).lr_lambdas[0]
    return [float(factor(step)) for step in range(total)]


def ours(total: int, **settings: Any) -> list[float]:
    factor = from_mapping(LRSchedulerSection, settings).build(total)
    return [factor(step) for step in range(total)]


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (1, 10), (3, 10), (10, 10), (7, 200)])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_equals_transformers(name: str, warmup: int, total: int) -> None:
    expected = theirs(name, warmup, total)
    assert ours(total, name=name, warmup_steps=warmup) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 0), (2, 0), (0, 10), (2, 3), (2, 8)])
def test_wsd_equals_transformers_with_its_floor(warmup: int, decay: int, floor: float) -> None:
    expected = theirs("wsd", warmup, 10, decay, floor)
    found = ours(10, name="wsd", warmup_steps=warmup, decay_steps=decay, min_lr_ratio=floor)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_the_documented_cosine() -> None:
    """C43: counted in optimizer steps, warm-up from 0; neither world size nor accumulation enters."""
    expected = [0, 0.5, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]
    assert ours(10, name="cosine", warmup_steps=2) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("name", ["linear", "cosine", "inverse_sqrt"])
def test_the_floor_lifts_the_curve_after_the_warm_up(name: str) -> None:
    plain, lifted = (ours(20, name=name, warmup_steps=4, min_lr_ratio=floor) for floor in (0.0, 0.1))
    assert lifted[:4] == plain[:4]
    assert lifted[4:] == pytest.approx([0.1 + 0.9 * factor for factor in plain[4:]])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_after_the_last_step_it_stays_at_the_floor(name: str) -> None:
    factor = from_mapping(LRSchedulerSection, {"name": name, "min_lr_ratio": 0.1}).build(10)
    assert [factor(10), factor(11), factor(1000)] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_zeros_are_values_and_nothing_divides_by_zero(name: str, total: int) -> None:
    """C44: without warm-up the first step has the full rate, and all steps are warm-up when asked."""
    for settings in ({}, {"warmup_steps": 0}, {"warmup_ratio": 0}):
        assert ours(total, name=name, **settings)[0] == 1.0
    decay = {"decay_steps": 0} if name == "wsd" else {}
    whole = ours(total, name=name, warmup_steps=total, **decay)
    assert whole == pytest.approx([step / total for step in range(total)])
    factor = from_mapping(LRSchedulerSection, {"name": name, "warmup_steps": total, **decay}).build(total)
    assert 0.0 <= factor(total) <= 1.0


def test_decay_steps_zero_is_no_decay() -> None:
    """C44."""
    assert ours(5, name="wsd", decay_steps=0) == [1.0] * 5
    assert ours(20, name="wsd") == ours(20, name="wsd", decay_ratio=0.1) != ours(20, name="wsd", decay_steps=0)


def test_ratios_are_rounded_up_but_not_by_rounding_errors() -> None:
    assert ours(100, name="constant", warmup_ratio=0.07) == ours(100, name="constant", warmup_steps=7)
    assert ours(100, name="constant", warmup_ratio=0.071) == ours(100, name="constant", warmup_steps=8)


def test_a_pure_function_of_the_step_needs_no_state_to_resume() -> None:
    """C45: 10 steps straight equal 5, a resume, and 5 more."""
    section = from_mapping(LRSchedulerSection, {"warmup_steps": 3})
    straight, resumed = section.build(10), pickle.loads(pickle.dumps(section.build(10)))
    assert [straight(step) for step in range(5, 10)] == [resumed(step) for step in range(5, 10)]


@pytest.mark.parametrize(
    ("settings", "total", "message"),
    [
        ({"warmup_steps": 11}, 10, r"warmup_steps: warm-up of 11 optimizer steps in a run of 10"),
        ({"name": "wsd", "warmup_steps": 5, "decay_ratio": 0.6}, 10, "warm-up and decay of 11"),
        ({}, 0, "needs at least 1"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(settings: dict[str, Any], total: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_mapping(LRSchedulerSection, settings).build(total)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_ratio"),
        ({"name": "wsd", "decay_steps": 0, "decay_ratio": 0.1}, "decay_ratio"),
        ({"name": "cosine", "decay_steps": 0}, "decay_steps"),
        ({"name": "linear", "decay_ratio": 0.0}, "decay_ratio"),
        ({"name": "constant", "min_lr_ratio": 0.0}, "min_lr_ratio"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
        ({"min_lr_ratio": 1.1}, "min_lr_ratio"),
        ({"name": "wsd", "decay_ratio": -0.1}, "decay_ratio"),
    ],
)
def test_settings_without_effect_or_out_of_range_are_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        from_mapping(LRSchedulerSection, settings)
