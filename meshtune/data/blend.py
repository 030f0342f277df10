"""Several sources as one data set: one behind the other, or each with a weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshtune.data.collate import Document
from meshtune.data.held_out import Rows
from meshtune.data.prepared_rows import PreparedRows
from meshtune.data.report import DataReport
from meshtune.data.units import Corpus, Unit, UnitOptions, Units
from meshtune.errors import DataError

_SEEDS_APART = 2**32


class Reported(Protocol):
    """What a source says of itself."""

    @property
    def report(self) -> DataReport: ...

    @property
    def fingerprint(self) -> str: ...


class Part(Reported, Corpus, Protocol):
    """Data of one source."""

    @property
    def mean_length(self) -> float: ...

    @property
    def supervised_share(self) -> float: ...

    def __len__(self) -> int: ...


@dataclass
class PartsReport(DataReport):
    """What each source holds; the counts are their sums."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        """Return the lines of all sources, in order."""
        return self.lines


class Joined(PreparedRows):
    """Rows of several sources, one source behind the other: one set of rows that are shuffled and packed together."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.lengths: NDArray[np.int64] = np.concatenate([part.lengths for part in parts])
        self.supervised_counts: NDArray[np.int64] = np.concatenate([part.supervised_counts for part in parts])
        self.fingerprint, self.report = parts_fingerprint(parts, None), parts_report(parts, [None] * len(parts))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Document:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[number][index - (int(self._ends[number - 1]) if number else 0)]


class Blend:
    """Sources that are met in proportion to their weights; see BlendedUnits."""

    def __init__(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        self._parts, self._shares = list(parts), [weight / sum(weights) for weight in weights]
        self.fingerprint = parts_fingerprint(parts, self._shares)
        self.report = parts_report(parts, self._shares)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @property
    def mean_length(self) -> float:
        """Tokens of the document in which the average token stands, units of all sources taken to be of one length."""
        return sum(share * part.mean_length for share, part in zip(self._shares, self._parts, strict=True))

    @property
    def supervised_share(self) -> float:
        """Targets per token, 0 to 1, likewise."""
        return sum(share * part.supervised_share for share, part in zip(self._shares, self._parts, strict=True))

    def units(self, options: UnitOptions) -> BlendedUnits:
        """Return the units of all sources in the order of each epoch, each source shuffled by a seed of its own."""
        found = [
            part.units(options.with_seed(options.seed + number * _SEEDS_APART))
            for number, part in enumerate(self._parts)
        ]
        names = [", ".join(part.report.sources[:3]) for part in self._parts]
        return BlendedUnits(found, self._shares, names)


class BlendedUnits:
    """An epoch has as many units as all sources together, and source i has the share w_i of them, spread evenly: any stretch
    of an epoch holds it to within about a unit. Each source walks through its own epochs, and goes on in the next epoch where
    it stopped: a source of great weight is met several times, one of small weight in part. Under packing a pack is of one
    source, so that shares are of tokens. A unit is [source, *unit of that source].
    """

    def __init__(self, parts: Sequence[Units], shares: Sequence[float], names: Sequence[str]) -> None:
        """Raises DataError for a weight so small that an epoch would hold no unit of its source."""
        self._parts, self._names, self._shares = list(parts), list(names), list(shares)
        self._count = sum(len(part) for part in parts)
        self._quotas = _apportion(self._count, shares)
        for name, share, quota in zip(names, shares, self._quotas, strict=True):
            if quota == 0:
                raise DataError(
                    f"{name}: its weight is {share:.3g} of all, less than one of the {self._count:,} units of an epoch"
                )
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in self._quotas])
        numbers = np.concatenate([np.full(quota, number) for number, quota in enumerate(self._quotas)])
        ranks = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.argsort(places, kind="stable")
        self._sources, self._ranks = numbers[order].astype(np.int32), ranks[order]

    def __len__(self) -> int:
        return self._count

    @property
    def kind(self) -> str:
        """What the units are called in a message."""
        return f"units (of {len(self._parts)} sources)"

    def between(self, epoch: int, start: int, stop: int) -> list[Unit]:
        """Return units [source, *unit]."""
        pairs = zip(self._sources[start:stop].tolist(), self._ranks[start:stop].tolist(), strict=True)
        return [[number, *self._unit(number, epoch * self._quotas[number] + rank)] for number, rank in pairs]

    def documents(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit."""
        return self._parts[unit[0]].documents(unit[1:])

    def names(self, unit: Unit) -> list[int | str]:
        """Return the names in the source, behind the source's."""
        return [f"{self._names[unit[0]]}: {name}" for name in self._parts[unit[0]].names(unit[1:])]

    def notes(self) -> list[str]:
        """Return what each source gives to an epoch."""
        rows = zip(self._names, self._shares, self._quotas, self._parts, strict=True)
        lines = []
        for name, share, quota, part in rows:
            lines.append(
                f"{name}: {share:.2%} of an epoch, {quota:,} units, {quota / len(part):.2f} of its {len(part):,}"
            )
            lines += [f"{name}: {note}" for note in part.notes()]
        return lines

    def _unit(self, number: int, place: int) -> Unit:
        epoch, start = divmod(place, len(self._parts[number]))
        return self._parts[number].between(epoch, start, start + 1)[0]


def _apportion(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to shares, `count` in all: the largest remainders are rounded up."""
    exact = [count * share for share in shares]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda number: whole[number] - exact[number])
    for number in by_remainder[: count - sum(whole)]:
        whole[number] += 1
    return whole


def parts_fingerprint(parts: Sequence[Reported], shares: Sequence[float] | None) -> str:
    """Return a hash of what the parts hold and which share each has."""
    facts = f"{[part.fingerprint for part in parts]} {shares}"
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def parts_report(parts: Sequence[Reported], shares: Sequence[float | None]) -> PartsReport:
    """Return one report of all parts: the counts added up, and the lines of each."""
    found = [part.report for part in parts]
    lines = []
    for report, share in zip(found, shares, strict=True):
        first, *rest = report.summary()
        lines += [first if share is None else f"weight {share:.2%}: {first}", *rest]
    whole = PartsReport(
        sources=[source for report in found for source in report.sources],
        max_seq_length=found[0].max_seq_length,
        parts=[report.as_dict() for report in found],
        lines=lines,
    )
    for report in found:
        whole.add(report)
    return whole
