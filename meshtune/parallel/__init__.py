"""Parallel: applies any plan on any layout. It knows modules and placements, never architectures."""

from meshtune.parallel.apply import Objective, Parallel, Settings, replicate, shard

__all__ = ["Objective", "Parallel", "Settings", "replicate", "shard"]
