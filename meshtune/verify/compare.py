"""Is what the ranks of a layout did what one process did?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtune.verify.report import Comparison

if TYPE_CHECKING:
    from meshtune.verify.course import Course

LOSS = 1e-5
GRAD_NORM = 1e-4
WEIGHT = 1e-4
# SGD's update is as large as the gradient is, so that its relative error is that of the gradient, however small the
# parameter's part of the global norm; AdamW's tells of directions alone.
UPDATE = 1e-2
# Layouts round in other places than a finer cut of one process does: by so much more or less.
_ROUNDINGS = 10
# No difference above this is put down to rounding.
_MOST_ROUNDING = 1e-3
_SHOWN = 3


@dataclass(frozen=True)
class Rounding:
    """What two courses of one process differ by that differ in rounding alone: the largest of each kind, relative."""

    loss: float = 0.0
    grad_norm: float = 0.0
    weight: float = 0.0
    update: float = 0.0

    def allows(self, kind: str, tolerance: float) -> float:
        return max(tolerance, _ROUNDINGS * min(getattr(self, kind), _MOST_ROUNDING))

    @property
    def note(self) -> str:
        """Where a tolerance had to give way, and to what."""
        tolerances = {"loss": LOSS, "grad_norm": GRAD_NORM, "weight": WEIGHT, "update": UPDATE}
        given = [kind for kind, tolerance in tolerances.items() if self.allows(kind, tolerance) > tolerance]
        told = ", ".join(f"{kind} {getattr(self, kind):.0e}" for kind in given)
        return f"rounding alone changes one process by {told}; {_ROUNDINGS} times that is allowed" if given else ""


def rounding_of(course: Course, reference: Course) -> Rounding:
    """From two courses of one process."""
    weights = list(course.weights.values())
    return Rounding(
        max(_relative(course.loss, reference.loss)),
        max(_relative(course.grad_norm, reference.grad_norm)),
        max(weight for weight, _ in weights),
        max(update for _, update in weights) if course.optimizer == "sgd" else 0.0,
    )


def compare(ranks: Sequence[Course], reference: Course, rounding: Rounding) -> Comparison:
    """Courses of one optimizer, by rank, beside that of one process."""
    first = ranks[0]
    found = Comparison(
        first.optimizer, _relative(first.loss, reference.loss), _relative(first.grad_norm, reference.grad_norm)
    )
    apart = {name: _badness(first.optimizer, rounding, *distance) for name, distance in first.weights.items()}
    if apart:
        found.worst_weight = max(apart, key=apart.__getitem__)
        found.worst_difference = first.weights[found.worst_weight][0]
    found.problems = [
        *_numbers(ranks, reference),
        *_steps("loss", found.loss, rounding.allows("loss", LOSS)),
        *_steps("gradient norm", found.grad_norm, rounding.allows("grad_norm", GRAD_NORM)),
        *_weights(found, first, apart),
        *_replicas(ranks),
    ]
    return found


def _relative(found: list[float], wanted: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, wanted, strict=False)]


def _numbers(ranks: Sequence[Course], reference: Course) -> list[str]:
    """Every rank reports the global figures, and the tokens are those of the reference."""
    problems = []
    if ranks[0].supervised_tokens != reference.supervised_tokens:
        problems.append(
            f"supervised tokens {ranks[0].supervised_tokens}, one process counts {reference.supervised_tokens}"
        )
    for name in ("loss", "grad_norm"):
        if any(getattr(rank, name) != getattr(ranks[0], name) for rank in ranks):
            problems.append(f"ranks report different values of {name}: {[getattr(rank, name) for rank in ranks]}")
    return problems


def _steps(what: str, differences: list[float], tolerance: float) -> list[str]:
    for step, difference in enumerate(differences):
        if not difference <= tolerance:
            return [f"{what} of step {step + 1} differs by {difference:.1e} (more than {tolerance:.0e})"]
    return []


def _badness(optimizer: str, rounding: Rounding, weight: float, update: float) -> float:
    """1 where a tensor is as far off as it may be."""
    update = update / rounding.allows("update", UPDATE) if optimizer == "sgd" else 0.0
    return max(weight / rounding.allows("weight", WEIGHT), update)


def _weights(found: Comparison, course: Course, apart: dict[str, float]) -> list[str]:
    bad = [name for name, badness in apart.items() if not badness <= 1.0]
    if not bad:
        return []
    found.first_different = bad[0]
    told = ", ".join(
        f"{name} by {course.weights[name][0]:.1e}, its update by {course.weights[name][1]:.1e}" for name in bad[:_SHOWN]
    )
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return [f"{len(bad)} of {len(apart)} tensors differ after the last step, relative in norm: {told}{more}"]


def _replicas(ranks: Sequence[Course]) -> list[str]:
    """Ranks that hold the same part of a parameter hold the same bits."""
    seen: dict[str, tuple[int, str]] = {}
    torn: dict[str, tuple[int, int]] = {}
    for rank, course in enumerate(ranks):
        for part, digest in course.parts.items():
            other, known = seen.setdefault(part, (rank, digest))
            if known != digest:
                torn.setdefault(part.partition(" ")[0], (other, rank))
    if not torn:
        return []
    told = ", ".join(f"{name} (ranks {a} and {b})" for name, (a, b) in list(torn.items())[:_SHOWN])
    return [f"copies of {len(torn)} parameters are no longer equal bit for bit: {told}"]
