"""Which steps are bad, and when there are too many of them."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from meshtune.errors import TrainingError
from meshtune.training.best import BestMetric
from meshtune.training.guard import BAD_STEPS_WITHIN, Guard
from meshtune.training.section import TrainingSection


def warm(guard: Guard, losses: list[float]) -> Guard:
    for loss in losses:
        guard.took(loss)
    return guard


@pytest.mark.parametrize("figures", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_what_is_not_finite(figures: tuple[float, float], policy: Any) -> None:
    verdict = Guard(policy).judge(*figures)
    assert verdict.action == policy
    assert verdict.reason == f"loss is {figures[0]}, gradient norm {figures[1]}"


def test_a_spike_by_hand() -> None:
    """Losses 1, 2, 3, 4, 5: median 3, distances 2, 1, 0, 1, 2 with median 1, so 4 deviations end at 3 + 4 * 1.4826 = 8.9304."""
    guard = warm(Guard(on_loss_spike="skip", window=8, threshold=4.0), [1.0, 2.0, 3.0, 4.0, 5.0])
    assert guard.limit() == pytest.approx(8.9304)
    assert guard.judge(8.93, 1.0).action == "accept"
    assert guard.judge(8.94, 1.0).action == "skip"


def test_losses_that_do_not_vary_make_no_spike_of_a_little() -> None:
    guard = warm(Guard(on_loss_spike="stop", window=8, threshold=6.0), [2.0] * 8)
    assert guard.judge(2.11, 1.0).action == "accept"
    assert guard.judge(2.13, 1.0).action == "stop"


def test_nothing_is_a_spike_before_a_quarter_of_the_window() -> None:
    guard = warm(Guard(on_loss_spike="stop", window=40), [1.0] * 9)
    assert guard.judge(1e9, 1.0).action == "accept"
    assert warm(guard, [1.0]).judge(1e9, 1.0).action == "stop"


def test_a_usual_run_has_no_spikes() -> None:
    """A falling loss with the noise of small batches, a thousand steps."""
    chance = random.Random(0)
    guard = Guard(on_loss_spike="skip")
    for step in range(1000):
        loss = 2 + 8 * math.exp(-step / 100) + chance.gauss(0, 0.15)
        assert guard.judge(loss, 1.0).action == "accept", step
        guard.took(loss)


def test_a_loss_that_is_skipped_is_not_compared_with() -> None:
    """Else a course that has gone astray would soon be the usual one."""
    guard = warm(Guard(on_loss_spike="skip", window=8), [1.0, 1.1] * 4)
    for _ in range(20):
        assert guard.judge(5.0, 1.0).action == "skip"


def test_ignored_spikes_need_no_memory() -> None:
    guard = warm(Guard(), [1.0] * 50)
    assert guard.state_dict() == {"recent": [], "bad": []}
    assert guard.judge(1e9, 1.0).action == "accept"
    assert not guard.forgives


def test_too_many_bad_steps_near_each_other() -> None:
    guard = Guard("skip", max_bad_steps=2)
    for step in (1, 2, 2 + BAD_STEPS_WITHIN, 3 + BAD_STEPS_WITHIN):
        guard.found_bad(step, "loss is nan")
    with pytest.raises(TrainingError, match=r"step 104: loss is nan; it is bad step number 3 within 100"):
        guard.found_bad(4 + BAD_STEPS_WITHIN, "loss is nan")


def test_its_state_survives_a_checkpoint() -> None:
    """As JSON; going back, it keeps the bad steps that it has found since."""
    guard = warm(Guard("rollback", "skip", window=8), [1.0, 2.0, 3.0])
    guard.found_bad(7, "loss is nan")
    saved = json.loads(json.dumps(guard.state_dict()))
    guard.found_bad(12, "loss is inf")
    warm(guard, [9.0])
    guard.load_state_dict(saved)
    assert guard.state_dict() == {"recent": [1.0, 2.0, 3.0], "bad": [[7, "loss is nan"], [12, "loss is inf"]]}
    assert guard.known_bad(12) == "loss is inf" and guard.known_bad(8) is None


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"spike_window": 16}, ["spike_window"]),
        ({"spike_threshold": 3.0, "on_nonfinite": "skip"}, ["spike_threshold"]),
        ({"max_bad_steps": 3}, ["max_bad_steps"]),
        ({"max_bad_steps": 3, "on_loss_spike": "stop"}, ["max_bad_steps"]),
        ({"max_bad_steps": 0, "on_nonfinite": "rollback", "on_loss_spike": "skip", "spike_window": 16}, []),
    ],
)
def test_settings_without_effect_are_problems(settings: dict[str, Any], keys: list[str]) -> None:
    section = TrainingSection(learning_rate=1e-3, **settings)
    assert [key for key, _ in section.problems()] == keys


@pytest.mark.parametrize(
    ("metric", "value", "before", "better"),
    [
        ("validation_loss", 1.0, None, True),
        ("validation_loss", 1.0, 1.1, True),
        ("validation_loss", 1.0, 1.0, False),
        ("validation_loss", math.nan, None, False),
        ("validation_chat_perplexity", 3.0, 2.0, False),
        ("validation_code_token_accuracy", 0.6, 0.5, True),
        ("validation_token_accuracy", 0.4, 0.5, False),
    ],
)
def test_what_is_better(metric: str, value: float, before: float | None, better: bool) -> None:
    found = BestMetric.named(metric)
    assert found is not None
    assert found.is_better(found.value({metric: value}), before) is better


def test_a_metric_that_is_not_there_is_named() -> None:
    found = BestMetric.named("validation_chat_loss")
    assert found is not None
    with pytest.raises(TrainingError, match="no metric validation_chat_loss; it has validation_loss"):
        found.value({"validation_loss": 1.0})
