"""What a comparison found, layout by layout: as data, and as lines for people."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["exact", "refused", "failing"]


@dataclass
class Comparison:
    """One optimizer's steps on a layout beside one process: differences of each step, relative; and the tensor that is the
    furthest from what it should be after the last, relative in norm, with the first that is too far."""

    optimizer: str
    loss: list[float]
    grad_norm: list[float]
    worst_weight: str = ""
    worst_difference: float = 0.0
    first_different: str | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What became of a layout. `reason` is why it was refused or in what it fails; empty where it is exact, of which `note` may
    say more."""

    layout: str
    ranks: int
    status: Status
    reason: str = ""
    comparisons: list[Comparison] = field(default_factory=list)
    seconds: float = 0.0
    trace: str = ""
    note: str = ""


@dataclass
class Report:
    """All that `meshtune verify` says."""

    model: str
    architecture: str
    parameters: int
    sizes: dict[str, Any]
    experts: bool
    packed: bool
    attention: str
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    own: str = ""
    """The recipe's own layout."""
    quantised: bool = False
    qat: bool = False
    """Whether weights are held in few bits."""

    @property
    def passed(self) -> bool:
        """Nothing is wrong, and what the recipe itself asks for is not refused."""
        return not any(v.status == "failing" or (v.status == "refused" and v.layout == self.own) for v in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in which infinity is no number."""
        return {"passed": self.passed, **_finite(asdict(self))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def headline(report: Report) -> list[str]:
    sizes = ", ".join(f"{name} {value}" for name, value in report.sizes.items())
    return [
        f"model       {report.architecture} of {report.model}, made small: {report.parameters:,} parameters ({sizes})",
        f"rows        {'packed' if report.packed else 'padded'}, attention {report.attention}",
        *(["weights     quantised; in the small model as int8, with a scale for each row"] if report.quantised else []),
        *(["weights     as they are: the rounding of quantization.qat is not tried"] if report.qat else []),
    ]


def lines(verdict: Verdict) -> list[str]:
    """A line for the layout, and one for each optimizer."""
    plural = "s" * (verdict.ranks > 1)
    head = f"{verdict.status:<8} {verdict.layout:<18} {verdict.ranks} rank{plural}, {verdict.seconds:.1f} s"
    said = [head, *(f"    {line}" for line in (verdict.reason + verdict.note).splitlines())]
    for one in verdict.comparisons:
        said.append(
            f"    {one.optimizer:<6} loss {_each(one.loss)}   grad norm {_each(one.grad_norm)}   "
            f"weights {one.worst_difference:.0e} ({one.worst_weight})"
        )
    return said


def _each(values: list[float]) -> str:
    return " ".join(f"{value:.0e}" for value in values)
