"""Names of layouts: what they stand for, and what `auto` tries."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.errors import RecipeError
from meshtune.layout import Layout
from meshtune.layout.section import DistributedSection
from meshtune.verify.layouts import STANDARD, STANDARD_EXPERTS, choose, most, own, parse

PLAIN = DistributedSection()


@pytest.mark.parametrize(
    ("name", "ranks", "readers", "wanted"),
    [
        ("fsdp2", 2, 2, {}),
        ("fsdp", 2, 2, {}),
        ("ddp3", 3, 3, {"strategy": "ddp"}),
        ("hsdp", 4, 4, {"dp_replicate_size": 2}),
        ("hsdp2xfsdp4", 8, 8, {"dp_replicate_size": 2}),
        ("hsdpxtp2", 8, 4, {"dp_replicate_size": 2, "tp_size": 2}),
        ("tp2", 2, 1, {"tp_size": 2}),
        ("tp4+sp", 4, 1, {"tp_size": 4, "sequence_parallel": True}),
        ("cp2+ring", 2, 1, {"cp_size": 2, "cp_method": "ring"}),
        ("ep2", 2, 2, {"ep_size": 2}),
        ("ep2xtp2", 2, 1, {"ep_size": 2, "tp_size": 2}),
        ("ep4xtp2", 4, 2, {"ep_size": 4, "tp_size": 2}),
        ("ep2xfsdp4", 4, 4, {"ep_size": 2}),
        ("pp2+interleaved_1f1b", 2, 1, {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}),
        ("pp2xddp2", 4, 2, {"pp_size": 2, "strategy": "ddp"}),
        ("tp2xfsdp2xpp2", 8, 2, {"pp_size": 2, "tp_size": 2}),
    ],
)
def test_a_name_stands_for_a_section_and_ranks(name: str, ranks: int, readers: int, wanted: dict[str, Any]) -> None:
    trial = parse(name, PLAIN)
    assert (trial.name, trial.ranks, trial.readers) == (name, ranks, readers)
    assert trial.section == DistributedSection(**wanted)


@pytest.mark.parametrize("name", [*STANDARD, *STANDARD_EXPERTS, "hsdpxtp2", "pp2xfsdp2xtp2", "ep4xtp2"])
def test_the_ranks_of_a_name_are_those_that_its_section_needs(name: str) -> None:
    trial = parse(name, PLAIN)
    layout = Layout.resolve(trial.section, trial.ranks)
    assert layout.size("batch") == trial.readers
    assert layout.world_size == trial.ranks


def test_what_the_recipe_says_of_an_axis_holds_where_the_layout_has_it() -> None:
    section = DistributedSection(tp_size=4, plan={"lm_head": "replicate"}, cp_size=2, cp_method="ring")
    assert parse("tp2", section).section.plan == {"lm_head": "replicate"}
    assert parse("cp2", section).section.cp_method == "ring"
    assert parse("cp2+ulysses", section).section.cp_method == "ulysses"
    assert parse("fsdp2", section).section == DistributedSection()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, "fsdp2"),
        ({"strategy": "ddp"}, "ddp2"),
        ({"dp_replicate_size": 2}, "hsdp"),
        ({"tp_size": 2, "sequence_parallel": True}, "fsdp2xtp2+sp"),
        ({"tp_size": 4, "pp_size": 2}, "pp2xtp4"),
        ({"tp_size": 8, "pp_size": 4, "cp_size": 2}, "pp2xcp2xtp2"),
        ({"ep_size": 4}, "ep4"),
    ],
)
def test_the_recipes_own_layout_has_as_many_ranks_as_a_laptop_takes(values: dict[str, Any], wanted: str) -> None:
    assert own(DistributedSection(**values)) == wanted
    assert parse(wanted, PLAIN).ranks <= 8


def test_auto_is_the_recipes_own_and_the_usual_ones_each_once() -> None:
    names = [trial.name for trial in choose("auto,cp2+ring,fsdp2", DistributedSection(tp_size=2), False)]
    assert names == ["fsdp2xtp2", *(name for name in STANDARD if name != "fsdp2xtp2"), "cp2+ring"]
    assert set(STANDARD_EXPERTS) <= {trial.name for trial in choose("auto", PLAIN, True)}
    assert all(trial.ranks <= 4 for trial in choose("auto", PLAIN, True))


def test_a_number_that_every_degree_divides() -> None:
    trials = [parse(name, PLAIN) for name in ("tp2", "tp3xcp2", "ep4xtp2")]
    assert (most(trials, "tp"), most(trials, "ep"), most(trials, "tp", "cp")) == (6, 4, 6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tp2xfoo2", "found 'foo2' where an axis with its degree is wanted"),
        ("tp0", "found 'tp0'"),
        ("tp2xtp2", "names tp twice"),
        ("ddp2xfsdp2", "names ddp beside fsdp"),
        ("tp2+fast", "found 'fast' after a plus; wanted one of sp, allgather"),
        ("fsdp2+sp", "sequence_parallel"),
        ("", "names no layout"),
    ],
)
def test_what_is_no_name_is_refused(name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        choose(name, PLAIN, False)
