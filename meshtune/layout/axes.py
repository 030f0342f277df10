"""The axes of a mesh and the views that are derived from them.

Axes, outer to inner: `pp, dp_replicate, dp_shard, cp, tp`. A view is a product of axes, never configured:

    batch = dp_replicate · dp_shard        who reads different rows
    loss  = dp_replicate · dp_shard · cp   over whom tokens are counted
    fsdp  = dp_shard · cp                  over whom a dense parameter is sharded

Experts live on another factoring of the same ranks: `dp_shard · cp · tp` is also `efsdp · ep`, where the ranks of one `ep` hold
different experts, and those of one `efsdp` shard the same ones.
"""

from __future__ import annotations

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES: tuple[str, ...] = ("pp", "dp_replicate", "efsdp", "ep")

VIEWS: dict[str, tuple[str, ...]] = {
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "world": AXES,
}
