"""Parallel: applies any plan on any layout. It knows modules and placements, never architectures."""

from meshtune.parallel.apply import Settings, Sharded, shard
from meshtune.parallel.running import Objective, Parallel, replicate

__all__ = ["Objective", "Parallel", "Settings", "Sharded", "replicate", "shard"]
