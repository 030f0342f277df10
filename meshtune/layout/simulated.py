"""Ranks as threads of one process: what a layout does to a small model can be tried wherever a recipe can be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from meshtune.layout.axes import AXES
from meshtune.layout.layout import Layout
from meshtune.layout.peers import Peers

T = TypeVar("T")


def simulate(layout: Layout, work: Callable[[Layout], T]) -> list[T]:
    """`work` on every rank of `layout`, each a thread with the layout as that rank sees it; results in rank order.

    Only `peers`, `rank` and `size` can be asked of it. The first error of any rank is raised, and no rank is left waiting.
    `work` copies models and builds none: transformers patches its classes for as long as a constructor runs.
    """
    world = _World(layout)
    results: list[T | None] = [None] * layout.world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(SimulatedLayout(world, rank))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append((rank, error))
            world.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(layout.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda found: found[0])[1]
    return results  # type: ignore[return-value]


class _World:
    """The meetings of each group of ranks, made when first asked for."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._aborted = False
        self._lock = threading.Lock()

    def meeting(self, name: str, others: tuple[int, ...], size: int) -> _Meeting:
        with self._lock:
            meeting = self._meetings.setdefault((name, others), _Meeting(size))
            if self._aborted:
                meeting.barrier.abort()
            return meeting

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()


class SimulatedLayout(Layout):
    """A layout as one simulated rank sees it."""

    def __init__(self, world: _World, rank: int):
        whole = world.layout
        super().__init__(
            whole.degrees, whole.strategy, whole.device_type, whole.ep, whole.sequence_parallel, whole.cp_method
        )
        object.__setattr__(self, "_world", world)
        object.__setattr__(self, "_place", whole.coordinates(rank))

    def rank(self, name: str) -> int:
        place: dict[str, int] = self._place  # type: ignore[attr-defined]
        rank = 0
        for axis in self._axes_of(name):
            rank = rank * self.size(axis) + place[axis]
        return rank

    def peers(self, name: str) -> Peers:
        place: dict[str, int] = self._place  # type: ignore[attr-defined]
        own = self._axes_of(name)
        kin = ("pp", "dp_replicate", "efsdp", "ep") if name in ("ep", "efsdp") else AXES
        others = tuple(place[axis] for axis in kin if axis not in own)
        return ThreadPeers(self._world.meeting(name, others, self.size(name)), self.rank(name))  # type: ignore[attr-defined]

    def _axes_of(self, name: str) -> tuple[str, ...]:
        return (name,) if name in ("ep", "efsdp") else self._axes(name)


class _Meeting:
    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.slots: list[object] = [None] * size


@dataclass(frozen=True)
class ThreadPeers:
    """`Peers` whose ranks are threads."""

    meeting: _Meeting
    rank: int

    @property
    def size(self) -> int:
        return len(self.meeting.slots)

    def _exchange(self, value: T) -> list[T]:
        self.meeting.slots[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return values  # type: ignore[return-value]

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        stacked = self.all_gather(tensor)
        if operation == "max":
            return stacked.amax(0)
        total = stacked[0].clone()
        for part in stacked[1:]:
            total += part
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor.detach()))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        parts = [whole[self.rank] for whole in self._exchange(tensor.detach())]
        return sum(parts[1:], parts[0].clone())

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        offers = self._exchange((tensor.detach(), tuple(sent)))
        parts = []
        for rows, counts in offers:
            start = sum(counts[: self.rank])
            parts.append(rows[start : start + counts[self.rank]])
        result = torch.cat(parts)
        assert len(result) == sum(received)
        return result
