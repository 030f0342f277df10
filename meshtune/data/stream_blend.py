"""Several streams in proportion to their weights, without an end."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from meshtune.data.blend import PartsReport, parts_fingerprint, parts_report
from meshtune.data.collate import Document
from meshtune.data.order import Cursor
from meshtune.data.stream import Stream
from meshtune.data.stream_walk import StreamWalk, checked_place
from meshtune.data.units import Unit, UnitOptions
from meshtune.errors import DataError

_SEEDS_APART = 2**56  # a stream sets the seeds of its blocks apart by 2**32


class StreamBlend:
    """Streams that are met in proportion to their weights; see StreamBlendOrder."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self.streams, self.shares = list(streams), [weight / sum(weights) for weight in weights]
        self.fingerprint = parts_fingerprint(streams, self.shares)

    @property
    def report(self) -> PartsReport:
        """What has been read so far, of each stream."""
        return parts_report(self.streams, self.shares)

    @property
    def mean_length(self) -> float:
        """Tokens of the document in which the average token stands, units of all streams taken to be of one length."""
        return sum(share * stream.mean_length for share, stream in zip(self.shares, self.streams, strict=True))

    @property
    def supervised_share(self) -> float:
        """Targets per token, 0 to 1, likewise."""
        return sum(share * stream.supervised_share for share, stream in zip(self.shares, self.streams, strict=True))

    def close(self) -> None:
        """Stop making blocks, and remove them."""
        for stream in self.streams:
            stream.close()


class StreamBlendOrder:
    """Of any stretch of units, stream i gives the share w_i to within about a unit; it walks through its own epochs, goes on
    where it stopped and begins anew at its end. The blend itself has no end, and every batch is full. A pack is of one stream,
    so that under packing shares are of tokens. A unit is [stream, *unit of that stream].

    The cursor holds the place in each stream (`sources`) and how many units each has given (`taken`).
    """

    def __init__(self, blend: StreamBlend, global_batch_size: int, options: UnitOptions) -> None:
        self.packing, self._size, self._shares = options.packing, global_batch_size, blend.shares
        self._names = [stream.report.named for stream in blend.streams]
        self._walks = [
            StreamWalk(stream, options.with_seed(options.seed + number * _SEEDS_APART))
            for number, stream in enumerate(blend.streams)
        ]

    def take(self, cursor: Cursor) -> tuple[list[Unit], Cursor]:
        """Return the global batch at a cursor, and the cursor after it. Raises DataError where a stream gives no unit."""
        places, taken = self._places(cursor), self._taken(cursor)
        numbers = self._turns(taken)
        found = {}
        for number, count in Counter(numbers).items():
            self._walks[number].let_go(places[number])
            units, places[number] = self._walk_on(number, places[number], count)
            found[number] = iter(units)
            taken[number] += count
        batch = [[number, *next(found[number])] for number in numbers]
        return batch, self._cursor(places, taken)

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit."""
        return self._walks[unit[0]].documents(unit[1:])

    def names(self, unit: Unit) -> list[int | str]:
        """Return which documents of which stream and block they are."""
        return [f"{self._names[unit[0]]}: {name}" for name in self._walks[unit[0]].names(unit[1:])]

    def progress(self, cursor: Cursor) -> float:
        """Return how often every stream has been begun anew."""
        return float(cursor["epoch"])

    def checked(self, cursor: Cursor) -> Cursor:
        """Return a saved cursor. Raises DataError for one that is not of this blend's course."""
        places, taken = self._places(cursor), self._taken(cursor)
        if (
            len(places) != len(self._walks)
            or len(taken) != len(places)
            or sum(taken) != cursor["units"]
            or min(taken) < 0
        ):
            raise DataError(
                f"the saved data cursor is unit {cursor['units']} of {len(places)} streams, which have given "
                f"{taken}, but the blend has {len(self._walks)} streams now"
            )
        return self._cursor([checked_place(place) for place in places], taken)

    def notes(self) -> list[str]:
        """Return what each stream gives."""
        lines = []
        for name, share, walk in zip(self._names, self._shares, self._walks, strict=True):
            lines.append(f"{name}: {share:.2%} of the units")
            lines += [f"{name}: {note}" for note in walk.notes()]
        return lines

    def _places(self, cursor: Cursor) -> list[Cursor]:
        start: list[Cursor] = [{"epoch": 0, "units": 0, "block": 0} for _ in self._walks]
        return list(cursor.get("sources", start))

    def _taken(self, cursor: Cursor) -> list[int]:
        return [int(count) for count in cursor.get("taken", [0] * len(self._walks))]

    def _cursor(self, places: list[Cursor], taken: list[int]) -> Cursor:
        epoch = min(place["epoch"] for place in places)
        return {"epoch": epoch, "units": sum(taken), "sources": places, "taken": taken}

    def _turns(self, taken: Sequence[int]) -> list[int]:
        """The streams of the next units: unit r of stream i has its place at (r + 1/2) / w_i, and the nearest place is next."""
        places = [(self._place(number, count), number) for number, count in enumerate(taken)]
        heapq.heapify(places)
        given = list(taken)
        turns: list[int] = []
        while len(turns) < self._size:
            number = places[0][1]
            turns.append(number)
            given[number] += 1
            heapq.heapreplace(places, (self._place(number, given[number]), number))
        return turns

    def _place(self, number: int, count: int) -> float:
        return (count + 0.5) / self._shares[number]

    def _walk_on(self, number: int, place: Cursor, count: int) -> tuple[list[Unit], Cursor]:
        """Return the next units of one stream, which begins anew at its end."""
        units: list[Unit] = []
        while len(units) < count:
            begins, before = (place.get("block", 0), place["units"]) == (0, 0), len(units)
            found, place, _ = self._walks[number].take(place, count - len(units))
            units += found
            if begins and len(units) == before:
                raise DataError(f"{self._names[number]}: no row of the stream can be used to train on")
        return units, place
