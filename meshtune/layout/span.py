"""Span: the part of a model that one pass runs, as names of blocks. Pipeline stages are spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Span:
    """Begin at the block `enter`, whose input is given, and end with the output of the block `leave`.

    None for `enter` is the model's own beginning, None for `leave` its own end. `replaced` are modules that stand, in this
    pass only, in the place of others.
    """

    enter: str | None = None
    leave: str | None = None
    replaced: Mapping[str, nn.Module] = field(default_factory=dict)


class Absent:
    """Base of what stands in a module's place on the pipeline stages that are without it. It has no parameters."""
