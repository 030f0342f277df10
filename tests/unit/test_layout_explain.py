"""A layout in words: who shares what with whom, and where each parameter lies."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.layout import AXES, DistributedSection, Layout, Plan
from meshtune.layout.experts import Experts
from meshtune.layout.explain import Placed, drawing, placed
from meshtune.layout.pieces import Cut

PLAN = Plan(
    units=("layers.0",),
    cuts={
        "embed.weight": Cut("tp", 0, (97,)),
        "layers.0.q.weight": Cut("tp", 0, (48, 24, 24)),
        "layers.0.o.weight": Cut("tp", 1, (48,)),
    },
    shared=frozenset({"layers.0.q_norm.weight"}),
)
PARAMETERS = [
    ("embed.weight", (97, 48), 4),
    ("layers.0.q.weight", (96, 48), 4),
    ("layers.0.o.weight", (48, 48), 4),
    ("layers.0.q_norm.weight", (12,), 4),
    ("layers.0.norm.weight", (48,), 4),
    ("norm.weight", (48,), 4),
]


def layout_of(world_size: int, **section: Any) -> Layout:
    return Layout.resolve(DistributedSection(**section), world_size)


def laid_out(layout: Layout, plan: Plan = PLAN) -> dict[str, Placed]:
    return {found.name: found for found in placed(layout, plan, PARAMETERS)}


def test_one_rank_holds_everything() -> None:
    found = laid_out(layout_of(1))
    assert all(p.placement == {} and p.local_shape == p.shape and p.reduction == "none" for p in found.values())
    assert found["embed.weight"].bytes == 97 * 48 * 4
    assert drawing(layout_of(1)) == ["fsdp2 on 1 rank: one rank"]


def test_tensor_parallelism_cuts_what_the_plan_says() -> None:
    found = laid_out(layout_of(2, tp_size=2))
    assert found["embed.weight"].placement == {"tp": "Shard(0)"}
    assert found["embed.weight"].local_shape == (49, 48)  # of the rank that holds most
    assert found["layers.0.q.weight"].placement == {"tp": "Shard(0) of each of 3 blocks"}
    assert found["layers.0.o.weight"].local_shape == (48, 24)
    assert found["layers.0.norm.weight"].placement == {"tp": "Replicate"}
    reductions = {name: p.reduction for name, p in found.items()}
    assert reductions.pop("layers.0.q_norm.weight") == "sum over tp 2, once a step"
    assert set(reductions.values()) == {"none"}


def test_under_sequence_parallelism_all_of_a_block_that_is_not_cut_is_summed() -> None:
    """C51. The last norm stands behind the blocks, where sequences are whole again."""
    found = laid_out(layout_of(2, tp_size=2, sequence_parallel=True))
    summed = {name for name, p in found.items() if "sum over tp" in p.reduction}
    assert summed == {"layers.0.q_norm.weight", "layers.0.norm.weight"}


def test_data_parallelism_shards_what_is_left() -> None:
    found = laid_out(layout_of(8, tp_size=2, dp_replicate_size=2))
    embedding = found["embed.weight"]
    assert embedding.placement == {"tp": "Shard(0)", "fsdp": "Shard(0)"} and embedding.local_shape == (25, 48)
    assert embedding.reduction == "reduce-scatter over fsdp 2, all-reduce over dp_replicate 2"
    assert laid_out(layout_of(4, strategy="ddp"))["embed.weight"].reduction == "all-reduce over 4 ranks"
    assert laid_out(layout_of(4, strategy="ddp"))["embed.weight"].local_shape == (97, 48)


def test_experts_lie_on_an_axis_of_their_own() -> None:
    plan = Plan(experts=(Experts("mlp.experts", 8, ("up",), ("num_experts",)),))
    layout = layout_of(4, ep_size=2)
    (found,) = placed(layout, plan, [("mlp.experts.up", (8, 16, 48), 2)])
    assert found.placement == {"ep": "Shard(0), 8 experts", "efsdp": "Shard(0)"}
    assert found.local_shape == (2, 16, 48) and found.bytes == 2 * 16 * 48 * 2
    assert found.reduction == "reduce-scatter over efsdp 2"
    assert found.as_dict()["local_shape"] == [2, 16, 48]


def test_the_stage_of_a_parameter_is_told() -> None:
    layout = layout_of(2, pp_size=2)
    (found,) = placed(layout, Plan(), [("norm.weight", (48,), 4)], lambda name: "last")
    assert found.placement == {"pp": "last"}


def test_the_mesh_is_drawn_with_every_rank_and_who_shares_what() -> None:
    lines = drawing(layout_of(8, tp_size=2, pp_size=2, ep_size=2))
    text = "\n".join(lines)
    assert lines[0] == "fsdp2 on 8 ranks: pp 2 x dp_shard 2 x tp 2, experts over ep 2"
    assert lines[1].split() == ["rank", "pp", "dp_shard", "tp", "efsdp", "ep"]
    assert [line.split() for line in lines[2:10]] == [
        ["0", "0", "0", "0", "0", "0"],
        ["1", "0", "0", "1", "0", "1"],
        ["2", "0", "1", "0", "1", "0"],
        ["3", "0", "1", "1", "1", "1"],
        ["4", "1", "0", "0", "0", "0"],
        ["5", "1", "0", "1", "0", "1"],
        ["6", "1", "1", "0", "1", "0"],
        ["7", "1", "1", "1", "1", "1"],
    ]
    assert "  tp 2: [0 1], [2 3], [4 5], [6 7] cut a layer between them" in text
    assert "  pp 2: [0 4], [1 5], [2 6], [3 7] hold different layers" in text
    assert "  ep 2: [0 1], [2 3], [4 5], [6 7] have different experts" in text
    assert "  efsdp 2: [0 2], [1 3], [4 6], [5 7] shard the same experts" in text
    assert "  batch 2: [0 2], [1 3], [4 6], [5 7] read different rows" in text
    assert "cp" not in text


def test_a_large_mesh_is_drawn_in_part() -> None:
    lines = drawing(layout_of(1024, tp_size=8))
    assert "  ... and 960 more" in lines
    assert any("..." in line and "(128 groups)" in line for line in lines if line.startswith("  tp 8"))


@pytest.mark.parametrize("world_size", [8, 16])
def test_groups_and_coordinates_agree(world_size: int) -> None:
    """Every rank is in one group of each view, with ranks that differ along it only; along an axis and its views."""
    layout = layout_of(world_size, tp_size=2, cp_size=2, ep_size=4)
    for name in (*AXES, "batch", "loss", "fsdp", "ep", "efsdp"):
        groups = layout.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(world_size))
        assert {len(group) for group in groups} == {layout.size(name)}
    for group in layout.groups("cp"):
        first, second = (layout.coordinates(rank) for rank in group)
        assert {axis for axis in AXES if first[axis] != second[axis]} == {"cp"}
