"""How the blocks of a model are given sequences, seen in a forward of a twin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from meshtune.layout.plan import Sequences


def sequences(calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]], tokens: int) -> Sequences:
    """From the arguments of blocks for one row of so many tokens, a number that no other dimension has."""
    dim = 1
    beside: dict[int | str, None] = {}
    for args, kwargs in calls:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if tokens in hidden_states.shape:
            dim = tuple(hidden_states.shape).index(tokens)
        further: Iterable[tuple[int | str, Any]] = chain(enumerate(args), kwargs.items())
        beside.update(
            {place: None for place, value in further if value is not hidden_states and _is_whole(value, tokens)}
        )
    return Sequences(dim, tuple(beside))


def _is_whole(value: Any, tokens: int) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.ndim > 2 and value.shape[1] == tokens
