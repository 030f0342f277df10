"""What counts as the numbers of one process: each kind of difference is caught, and rounding is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from meshtune.layout.pieces import Piece, set_piece
from meshtune.verify.compare import Rounding, compare, rounding_of
from meshtune.verify.course import Course, digests, distances

REFERENCE = Course("sgd", [4.0, 3.5, 3.0], [2.0, 1.5, 1.0], [90, 80, 70], {"a": (0.0, 0.0), "b": (0.0, 0.0)})
PARTS = [{"w 0": "x", "v 0": "y"}, {"w 0": "x", "v 1": "z"}]
SAME = [replace(REFERENCE, parts=parts) for parts in PARTS]


def test_equal_courses_have_no_problem() -> None:
    found = compare(SAME, REFERENCE, Rounding())
    assert found.problems == [] and found.loss == [0.0, 0.0, 0.0] and found.first_different is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss": [4.0, 3.5001, 3.0]}, "loss of step 2 differs by 2.9e-05"),
        ({"loss": [float("nan"), 3.5, 3.0]}, "loss of step 1 differs by nan"),
        ({"grad_norm": [2.0, 1.5, 1.001]}, "gradient norm of step 3 differs by 1.0e-03"),
        ({"supervised_tokens": [90, 81, 70]}, r"supervised tokens \[90, 81, 70\], one process counts \[90, 80, 70\]"),
        ({"weights": {"a": (0.0, 0.0), "b": (2e-4, 0.0)}}, "1 of 2 tensors differ .*: b by 2.0e-04"),
        (
            {"weights": {"a": (1e-6, 0.5), "b": (0.0, 0.0)}},
            "1 of 2 tensors differ .*: a by 1.0e-06, its update by 5.0e-01",
        ),
    ],
)
def test_each_kind_of_difference_is_caught(change: dict, says: str) -> None:
    ranks = [replace(rank, **change) for rank in SAME]
    (problem,) = compare(ranks, REFERENCE, Rounding()).problems
    assert re.search(says, problem), problem


def test_an_update_is_compared_where_its_size_is_that_of_the_gradient() -> None:
    weights = {"a": (1e-6, 0.5), "b": (0.0, 0.0)}
    adamw = replace(REFERENCE, optimizer="adamw")
    assert compare([replace(adamw, weights=weights)], adamw, Rounding()).problems == []


def test_ranks_must_agree_with_each_other() -> None:
    ranks = [SAME[0], replace(SAME[1], loss=[4.0, 3.5, 3.0 + 1e-9])]
    assert "different values of loss" in compare(ranks, REFERENCE, Rounding()).problems[0]
    torn = [SAME[0], replace(SAME[1], parts={"w 0": "other", "v 1": "z"})]
    assert compare(torn, REFERENCE, Rounding()).problems == [
        "copies of 1 parameters are no longer equal bit for bit: w (ranks 0 and 1)"
    ]


def test_rounding_widens_what_is_allowed_up_to_a_bound() -> None:
    ranks = [replace(rank, grad_norm=[2.0, 1.5, 1.002]) for rank in SAME]
    finer = replace(REFERENCE, grad_norm=[2.0, 1.5, 1.0005])
    rounding = rounding_of(finer, REFERENCE)
    assert compare(ranks, REFERENCE, rounding).problems == []
    assert rounding.note == "rounding alone changes one process by grad_norm 5e-04; 10 times that is allowed"
    wild = [replace(rank, grad_norm=[2.0, 1.5, 1.1]) for rank in SAME]
    assert compare(wild, REFERENCE, replace(rounding, grad_norm=0.5)).problems


def test_weights_are_compared_with_the_update_and_with_a_floor(tmp_path: Path) -> None:
    start = {"grown": torch.ones(100), "still": torch.ones(100), "gone": torch.ones(2), "short": torch.ones(3)}
    wanted = {**start, "grown": torch.full((100,), 1.01)}
    found = {"grown": torch.full((100,), 1.02), "still": start["still"] + 3e-7, "short": torch.ones(2)}
    for name, tensors in (("start", start), ("wanted", wanted), ("found", found)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    apart = distances(tmp_path / "found", tmp_path / "wanted", tmp_path / "start")
    assert apart["grown"] == pytest.approx((0.01 / 1.01, 1.0), rel=1e-3)
    assert apart["still"][0] < 1e-6 and apart["still"][1] == 0.0
    assert apart["gone"] == apart["short"] == (float("inf"), float("inf"))


def test_a_tied_parameter_goes_by_one_name_and_parts_by_their_place() -> None:
    model = nn.Module()
    model.head = nn.Linear(3, 2)
    model.all_tied_weights_keys = {"head.weight": "embedding.weight"}
    set_piece(model.head, "bias", Piece("tp", (4,), 0, ((2, 2),)))
    assert [name for name, _ in digests(model)] == ["embedding.weight ((0, 0), (2, 3))", "head.bias [((2,), (2,))]"]
