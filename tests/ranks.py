"""Rank processes for a whole pytest session: `verify`'s own pool, with the first error of a rank raised here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshtune.verify.pool import Pool, first_broken

ROOT = Path(__file__).resolve().parent.parent


class Ranks(Pool):
    """Use as a context manager; `call(world_size, function, *arguments)` returns the results by rank.

    Ranks are forked with PEFT imported, which takes each of them a second else; in `verify` those that need it do that.
    """

    def __init__(self) -> None:
        super().__init__()
        if self._context.get_start_method() == "forkserver":
            self._context.set_forkserver_preload(["peft", "meshtune.verify.preload"])

    def call(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 180.0) -> list[Any]:
        """`function(*arguments)` on every rank of a gloo world; tensors travel by value.

        The first exception of a rank is raised, with the rank and its traceback as a note.
        """
        answers = self.run(world_size, function, *arguments, timeout=timeout)
        if (broken := first_broken(answers)) is not None and broken.error is not None:
            broken.error.add_note(f"raised on rank {answers.index(broken)}; remote traceback:\n{broken.trace}")
            raise broken.error
        return [answer.value for answer in answers]
