"""What a pipeline says that it cannot do."""

from __future__ import annotations

import pytest

from meshtune.parallel.pipeline import problems


@pytest.mark.parametrize(
    ("ranks", "schedule", "microbatches", "accumulation"),
    [
        (2, "gpipe", None, 1),
        (4, "1f1b", None, 4),
        (2, "1f1b", 2, 6),
        (4, "interleaved_1f1b", None, 10),
        (4, "interleaved_zero_bubble", 3, 6),
    ],
)
def test_what_fits_is_no_problem(ranks: int, schedule: str, microbatches: int | None, accumulation: int) -> None:
    assert not list(problems(ranks, schedule, microbatches, accumulation))


@pytest.mark.parametrize(
    ("ranks", "schedule", "microbatches", "accumulation", "key", "text"),
    [
        (2, "1f1b", 4, 6, "pp_microbatches", "4 must divide the 6 micro-batches"),
        (
            4,
            "1f1b",
            None,
            2,
            "pp_schedule",
            "1f1b needs 4 micro-batches or more to go through 4 stages together, found 2",
        ),
        (2, "interleaved_1f1b", None, 5, "pp_microbatches", "in 2 rounds, which must divide their number, found 5"),
    ],
)
def test_what_does_not_fit_is_told_with_numbers(
    ranks: int, schedule: str, microbatches: int | None, accumulation: int, key: str, text: str
) -> None:
    ((found, message),) = problems(ranks, schedule, microbatches, accumulation)
    assert found == f"distributed.{key}" and text in message


def test_zero_bubble_and_compilation_exclude_each_other() -> None:
    ((key, message),) = problems(2, "interleaved_zero_bubble", None, 4, compiled=True)
    assert key == "distributed.pp_schedule" and "torch.compile cannot" in message
