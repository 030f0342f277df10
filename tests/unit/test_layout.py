"""A layout is resolved from a recipe and a number of ranks, or refused with the numbers that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.errors import LayoutError, RecipeError
from meshtune.layout import AXES, DistributedSection, Layout
from meshtune.layout.simulated import simulate


def resolve(world_size: int, **section: Any) -> Layout:
    return Layout.resolve(from_mapping(DistributedSection, section), world_size)


@pytest.mark.parametrize(
    ("world_size", "section", "degrees"),
    [
        (1, {}, {}),
        (4, {}, {"dp_shard": 4}),
        (4, {"dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"strategy": "ddp"}, {"dp_replicate": 4}),
        (8, {"strategy": "ddp", "tp_size": 2}, {"dp_replicate": 4, "tp": 2}),
        (16, {"tp_size": 2, "pp_size": 2, "cp_size": 2}, {"pp": 2, "cp": 2, "tp": 2, "dp_shard": 2}),
    ],
)
def test_what_remains_of_the_ranks_is_data_parallel(
    world_size: int, section: dict[str, Any], degrees: dict[str, int]
) -> None:
    assert resolve(world_size, **section).degrees == {axis: degrees.get(axis, 1) for axis in AXES}


def test_views_are_products_of_axes() -> None:
    layout = resolve(32, tp_size=2, cp_size=2, pp_size=2, dp_replicate_size=2, ep_size=4)
    sizes = {"batch": 4, "loss": 8, "fsdp": 4, "world": 32, "ep": 4, "efsdp": 2}
    assert {name: layout.size(name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("world_size", "section", "says"),
    [
        (
            3,
            {"tp_size": 2},
            "distributed.tp_size: tp_size 2 needs a number of ranks that is a multiple of 2, found 3; start 2",
        ),
        (
            1,
            {"tp_size": 2, "pp_size": 2},
            "tp_size 2 needs a number of ranks that is a multiple of 4, found 1; start 4",
        ),
        (2, {"ep_size": 4}, "distributed.ep_size: 4 must divide dp_shard 2 x cp 1 x tp 1 = 2"),
        # Stages and replicas hold experts of their own.
        (8, {"ep_size": 4, "pp_size": 2, "dp_replicate_size": 2}, "4 must divide dp_shard 2 x cp 1 x tp 1 = 2"),
    ],
)
def test_a_misfit_is_refused_with_numbers(world_size: int, section: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError) as error:
        resolve(world_size, **section)
    assert says in str(error.value)


def test_heads_are_counted_before_a_weight_is_read() -> None:
    layout = resolve(4, tp_size=4)
    layout.check({"num_attention_heads": 12})
    with pytest.raises(LayoutError, match="4 ranks cannot share out 6 attention heads evenly; write one of 1, 2, 3, 6"):
        layout.check({"num_attention_heads": 6})


@pytest.mark.parametrize(
    "section",
    [
        {"sequence_parallel": True},
        {"plan": {"a": "colwise"}},
        {"cp_method": "ring"},
        {"pp_schedule": "gpipe"},
        {"pp_microbatches": 2},
        {"strategy": "ddp", "dp_replicate_size": 2},
        {"strategy": "ddp", "ep_size": 2},
    ],
    ids=str,
)
def test_a_key_without_an_effect_is_an_error(section: dict[str, Any]) -> None:
    """Promise 3; it names the key and what gives it an effect."""
    with pytest.raises(RecipeError) as error:
        from_mapping(DistributedSection, section)
    assert list(section)[-1] in str(error.value)


def test_a_simulated_rank_knows_its_place_on_every_axis_and_view() -> None:
    layout = resolve(8, tp_size=2, cp_size=2, ep_size=4)
    for rank, own in enumerate(simulate(layout, lambda own: own)):
        place = layout.coordinates(rank)
        assert {name: own.rank(name) for name in place} == place
        assert own.rank("batch") == place["dp_shard"] and own.rank("fsdp") == place["dp_shard"] * 2 + place["cp"]
        assert own.counts_rows == (place["cp"] == place["tp"] == 0)
