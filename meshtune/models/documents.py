"""What attention must know of a batch that its arguments do not say: where documents end, and which ranks hold the rest.

Some models do not hand extra keyword arguments down to attention, so none of it can travel through the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from meshtune.layout.peers import Peers


@dataclass(frozen=True)
class ContextParallel:
    """The ranks over which sequences are cut, as `layout.zigzag` says, and how attention reaches what they hold:
    `allgather`, `ring` or `ulysses`."""

    peers: Peers
    method: str = "allgather"


@dataclass(frozen=True)
class Row:
    """`lengths` of the documents of the whole row, or None if each row of the batch is one document. `around` is the part of a
    row inside which a layer has been given the whole of it."""

    lengths: tuple[int, ...] | None = None
    context: ContextParallel | None = None
    around: Row | None = None


_row: ContextVar[Row] = ContextVar("row", default=Row())  # noqa: B039  frozen


@contextmanager
def documents(lengths: Sequence[int] | None, context: ContextParallel | None = None) -> Iterator[None]:
    """While open, in this thread, attention treats the single row of the batch as documents of these lengths, and the tokens at
    hand as this rank's part of it."""
    if context is not None and context.peers.size == 1:
        context = None
    token = _row.set(Row(None if lengths is None else tuple(lengths), context))
    try:
        yield
    finally:
        _row.reset(token)


def reopening() -> Callable[[], AbstractContextManager[None]]:
    """Opens later, in any thread, what is open now: activation checkpointing runs attention again in the backward, on GPUs in
    another thread, and maybe after other batches."""
    row = _row.get()
    return partial(documents, row.lengths, row.context)


def current_row() -> Row:
    """What is open in this thread."""
    return _row.get()


def enter_whole_row() -> None:
    """From now on, in this thread, the tokens at hand are all of the row."""
    row = _row.get()
    _row.set(Row(row.lengths, around=row))


def leave_whole_row() -> Row:
    """The end of what `enter_whole_row` has begun, and what the tokens at hand are again."""
    around = _row.get().around
    assert around is not None
    _row.set(around)
    return around


def positions_restart() -> bool:
    """Whether the tokens at hand are not one whole sequence from position 0 on."""
    return _row.get() != Row()
