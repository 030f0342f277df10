"""Sequence parallelism: between the splits of its blocks, each tensor-parallel rank has its own part of the sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshtune.layout import Plan
from meshtune.layout.collectives import gather_from, reduce_scatter_to, scatter_to
from meshtune.layout.peers import Peers
from meshtune.parallel.borders import at_entry, at_exit, is_activation

__all__ = ["cut_sequence"]


class SequencePart:
    """This rank's part of the sequences of a batch: [batch, length, ...], or [batch * length, ...] inside some blocks."""

    def __init__(self, peers: Peers, dim: int):
        """`dim` is that of positions in what blocks hand on."""
        self.peers, self.dim = peers, dim
        self.batch = self.length = 0

    def enter(self, hidden_states: Tensor) -> Tensor:
        self.batch, whole = hidden_states.shape[self.dim - 1 : self.dim + 1]
        self.length = whole // self.peers.size
        return scatter_to(hidden_states, self.dim, self.peers)

    def leave(self, hidden_states: Tensor) -> Tensor:
        return gather_from(hidden_states, self.dim, self.peers, partial=False)

    def holds(self, value: Tensor, hidden_states: Tensor | None) -> bool:
        """Whether a tensor is of these positions, and not of the whole row as tables of positions are. `hidden_states` is the
        first that was, in the same call."""
        if value.ndim < 2:
            return False
        if torch.is_grad_enabled() and value.is_floating_point() and not is_activation(value, hidden_states):
            return False
        return value.shape[1] == self.length if value.ndim > 2 else value.shape[0] == self.batch * self.length

    def join(self, own: Tensor) -> Tensor:
        """The whole sequences."""
        return self._by_rows(own, self.length, lambda rows: gather_from(rows, 1, self.peers))

    def place(self, own: Tensor) -> Tensor:
        """Whole sequences that are zero at other ranks' positions: a sum over ranks joins them, so nothing is communicated."""
        before = self.peers.rank * self.length
        after = (self.peers.size - 1) * self.length - before

        def pad(rows: Tensor) -> Tensor:
            return nn.functional.pad(rows, (0, 0) * (rows.ndim - 2) + (before, after))

        return self._by_rows(own, self.length, pad)

    def sum(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over ranks."""
        return self._by_rows(whole, self.length * self.peers.size, lambda rows: reduce_scatter_to(rows, 1, self.peers))

    def own(self, output: Any) -> Any:
        """Of what every rank has computed whole, its own positions; so its gradient is a part, as `join` expects."""
        return tree_map(self._own_positions, output)

    def _own_positions(self, value: Any) -> Any:
        whole, start = self.length * self.peers.size, self.peers.rank * self.length
        if not isinstance(value, Tensor) or value.ndim < 2 or not value.is_floating_point():
            return value
        if (value.shape[1] if value.ndim > 2 else value.shape[0]) != (whole if value.ndim > 2 else self.batch * whole):
            return value
        return self._by_rows(value, whole, lambda rows: rows.narrow(1, start, self.length))

    def _by_rows(self, tensor: Tensor, length: int, work: Callable[[Tensor], Tensor]) -> Tensor:
        return work(tensor) if tensor.ndim > 2 else work(tensor.unflatten(0, (-1, length))).flatten(0, 1)


def cut_sequence(model: nn.Module, plan: Plan, runs: Sequence[Sequence[str]], peers: Peers) -> None:
    """From the first block of a run to its last, hidden states are this rank's part of the sequence; splits see all of it."""
    sequence = SequencePart(peers, plan.sequences.dim)
    for run in runs:
        _scatter_at_entry(model.get_submodule(run[0]), sequence)
    for path in chain.from_iterable(runs):
        _scatter_arguments(model.get_submodule(path), plan.sequences.beside, peers)
    for split in plan.splits:
        for path in split.entries:
            further = sequence.place if split.adds else sequence.join
            at_entry(model.get_submodule(path), sequence.join, sequence.holds, further)
        for path in split.exits:
            at_exit(model.get_submodule(path), sequence.sum)
    for path in plan.whole:
        at_entry(model.get_submodule(path), sequence.join, sequence.holds, sequence.join)
        model.get_submodule(path).register_forward_hook(lambda _module, _args, output: sequence.own(output))
    for run in runs:
        at_exit(model.get_submodule(run[-1]), sequence.leave)


def _scatter_at_entry(block: nn.Module, sequence: SequencePart) -> None:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (sequence.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": sequence.enter(kwargs["hidden_states"])}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _scatter_arguments(block: nn.Module, places: Sequence[int | str], peers: Peers) -> None:
    """Arguments of a block that are given whole: each rank takes its positions."""

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = [
            scatter_to(value, 1, peers) if i in places and value is not None else value for i, value in enumerate(args)
        ]
        named = {
            k: scatter_to(value, 1, peers) if k in places and value is not None else value
            for k, value in kwargs.items()
        }
        return tuple(found), named

    if places:
        block.register_forward_pre_hook(enter, with_kwargs=True)
