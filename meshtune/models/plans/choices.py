"""What shapes leave open about how a region is cut (are gate and up stacked or interleaved? are q, k and v?).

Which answer is right is tried on a twin, then used for the model itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Choice:
    """One answer to what shapes leave open.

    Attributes:
        border: where a split begins and ends: at the `child` of the block that holds the region, at the module that holds the
            `part`, at the `child` which also adds a residual stream that it is given (`adding`), or at the part's `layers`.
        stacked: whether a fused projection holds its parts one after another, or interleaved group by group.
        norms: whether a normalisation over all heads is given all of them (`gather`), or is one for each head (`cut`).
        counts: where a module reads how many heads there are: from its own numbers, from those and the width of all heads
            (`widths`), or from its config.
        biases: whether the block is given a score bias for each head.
    """

    border: Literal["child", "part", "adding", "layers"] = "child"
    stacked: bool = True
    norms: Literal["gather", "cut"] = "gather"
    counts: Literal["own", "widths", "config"] = "own"
    biases: bool = False


def choices() -> Iterator[Choice]:
    """Every choice, the usual ones first."""
    for biases, counts, norms, border, stacked in itertools.product(
        (False, True),
        ("own", "widths", "config"),
        ("gather", "cut"),
        ("child", "part", "adding", "layers"),
        (True, False),
    ):
        yield Choice(border, stacked, norms, counts, biases)  # type: ignore[arg-type]


class Unfit(Exception):
    """A choice that the shapes of a region rule out."""
