"""The names of layouts: `fsdp2`, `tp2+sp`, `pp2xfsdp2xtp2`. Each stands for a `distributed` section and a number of ranks.

    layout    = part { "x" part } { "+" option }
    part      = axis [ degree ]                              the degree is 2 if it is not written
    axis      = fsdp | hsdp | ddp | tp | cp | ep | pp
    option    = sp | allgather | ring | ulysses | gpipe | 1f1b | interleaved_1f1b | interleaved_zero_bubble

`hsdp` is that many replicas of a group of `fsdp` ranks (2 if no `fsdp` is named). A layout with `ep` and no `fsdp` has as many
data-parallel ranks as its experts need. In every layout, what the recipe says of an axis that it uses (its plan, its method,
its schedule) holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.layout.section import ContextMethod, DistributedSection, PipelineSchedule

STANDARD = ("fsdp2", "hsdp", "ddp", "tp2", "tp2+sp", "cp2", "pp2", "fsdp2xtp2")
STANDARD_EXPERTS = ("ep2", "ep4xtp2")
_AXES = ("pp", "hsdp", "ddp", "fsdp", "cp", "ep", "tp")
_MOST_RANKS = 8


@dataclass(frozen=True)
class Trial:
    """A layout to be tried: its name, its ranks, and how many of them read different rows."""

    name: str
    ranks: int
    readers: int
    section: DistributedSection


def parse(name: str, recipe: DistributedSection) -> Trial:
    """The layout of that name, for a recipe with that section. Raises RecipeError for what is not a name of a layout."""
    body, *options = name.strip().split("+")
    degrees = _degrees(name, body)
    replicas, shard = degrees.get("hsdp", 1), degrees.get("fsdp", 2 if "hsdp" in degrees else 1)
    inner, experts = degrees.get("cp", 1) * degrees.get("tp", 1), degrees.get("ep", 1)
    if "fsdp" not in degrees and "hsdp" not in degrees:
        shard = experts // math.gcd(experts, inner)
    readers = degrees.get("ddp", replicas * shard)
    sizes = {
        "dp_replicate_size": replicas,
        **{f"{axis}_size": degrees.get(axis, 1) for axis in ("tp", "cp", "pp", "ep")},
    }
    values = {"strategy": "ddp" if "ddp" in degrees else "fsdp2", **sizes, **_kept(recipe, degrees)}
    for option in options:
        values |= _option(name, option)
    return Trial(
        name.strip(), readers * inner * degrees.get("pp", 1), readers, from_mapping(DistributedSection, values)
    )


def choose(asked: str, recipe: DistributedSection, has_experts: bool) -> list[Trial]:
    """The layouts of a comma-separated list, in which `auto` stands for the recipe's own and the standard ones.

    Raises RecipeError for a name that is none.
    """
    names: list[str] = []
    for name in filter(None, (part.strip() for part in asked.split(","))):
        if name == "auto":
            names += [own(recipe), *STANDARD, *(STANDARD_EXPERTS if has_experts else ())]
        else:
            names.append(name)
    if not names:
        raise RecipeError("--layouts: names no layout; write auto, or names such as fsdp2,tp2+sp")
    return [parse(name, recipe) for name in dict.fromkeys(names)]


def own(recipe: DistributedSection) -> str:
    """The layout of a recipe's section, with each degree cut to 2 where all of it would be more ranks than a laptop takes."""
    degrees = {axis: getattr(recipe, f"{axis}_size") for axis in ("pp", "cp", "ep", "tp")}
    degrees["hsdp"] = recipe.dp_replicate_size
    if math.prod(size for axis, size in degrees.items() if axis != "ep") > _MOST_RANKS:
        degrees = {axis: min(size, 2) for axis, size in degrees.items()}
    ranks = math.prod(size for axis, size in degrees.items() if axis != "ep")
    if recipe.strategy == "ddp":
        degrees["ddp"] = 2 if 2 * ranks <= _MOST_RANKS else 1
    elif degrees["hsdp"] == degrees["ep"] == 1 and 2 * ranks <= _MOST_RANKS:
        degrees["fsdp"] = 2
    parts = [
        f"{axis}{degrees[axis]}" if axis != "hsdp" else _hsdp(degrees[axis])
        for axis in _AXES
        if degrees.get(axis, 1) > 1
    ]
    return ("x".join(parts) or "fsdp2") + "+sp" * recipe.sequence_parallel


def _hsdp(replicas: int) -> str:
    return "hsdp" if replicas == 2 else f"hsdp{replicas}"


def most(trials: Sequence[Trial], *axes: str) -> int:
    """A number of which the degrees of these axes are divisors, in every layout alone."""
    return math.lcm(*(math.prod(getattr(trial.section, f"{axis}_size") for axis in axes) for trial in trials))


def _degrees(name: str, body: str) -> dict[str, int]:
    degrees: dict[str, int] = {}
    for part in body.split("x"):
        match = re.fullmatch(rf"({'|'.join(_AXES)})([1-9]\d*)?", part)
        if match is None:
            raise RecipeError(
                f"--layouts: {name!r} is no layout: found {part!r} where an axis with its degree is wanted, such as fsdp2; axes: "
                f"{', '.join(sorted(_AXES))}"
            )
        if match[1] in degrees:
            raise RecipeError(f"--layouts: {name!r} names {match[1]} twice")
        degrees[match[1]] = int(match[2] or 2)
    if "ddp" in degrees and degrees.keys() & {"fsdp", "hsdp"}:
        raise RecipeError(f"--layouts: {name!r} names ddp beside fsdp; hsdp is what replicates a sharded model")
    return degrees


def _kept(recipe: DistributedSection, degrees: dict[str, int]) -> dict[str, Any]:
    """What a recipe says of the axes that a layout uses, beside their sizes."""
    keys = {"tp": ("plan",), "cp": ("cp_method",), "pp": ("pp_schedule",)}
    used = [key for axis, group in keys.items() if degrees.get(axis, 1) > 1 for key in group]
    return {key: getattr(recipe, key) for key in used if getattr(recipe, key) is not None}


def _option(name: str, option: str) -> dict[str, Any]:
    if option == "sp":
        return {"sequence_parallel": True}
    for key, kinds in (("cp_method", get_args(ContextMethod)), ("pp_schedule", get_args(PipelineSchedule))):
        if option in kinds:
            return {key: option}
    known = ["sp", *get_args(ContextMethod), *get_args(PipelineSchedule)]
    raise RecipeError(f"--layouts: {name!r}: found {option!r} after a plus; wanted one of {', '.join(known)}")
