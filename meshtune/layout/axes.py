"""The axes of a mesh and the views that are derived from them.

Axes, outer to inner: `pp, dp_replicate, dp_shard, cp, tp`. Experts live on `ep`, a refactoring of `dp_shard·cp·tp` into
`efsdp·ep`. A view is a product of axes, never configured:

    batch = dp_replicate · dp_shard     who reads different rows
    loss  = dp_replicate · dp_shard · cp   over whom tokens are counted
    fsdp  = dp_shard · cp               over whom a dense parameter is sharded
"""

from __future__ import annotations

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

VIEWS: dict[str, tuple[str, ...]] = {
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "world": AXES,
}
