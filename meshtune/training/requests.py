"""What single ranks ask of the loop; all of them hear of it with the token counts of the next step, and act together."""

from __future__ import annotations

from typing import NamedTuple


class Requests(NamedTuple):
    """How often each was asked for, over all ranks."""

    interrupts: int = 0
    terminations: int = 0
    saves: int = 0
    """By the clock of the first rank."""
    failures: int = 0
    """Checkpoints that could not be written in the background."""
