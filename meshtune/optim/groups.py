"""`optimizer.groups`: parameters that learn at another rate, or decay otherwise, named by patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from meshtune.config import Section
from meshtune.config.patterns import as_written, covers, misspelt
from meshtune.errors import Problem, RecipeError

__all__ = ["GroupSection", "Rule", "assign"]


class GroupSection(Section):
    """One group of parameters; the first group that matches a parameter has it."""

    match: list[str] = Field(
        min_length=1,
        description="Ends of names of modules or parameters, cut at dots; `*` stands for anything. Every one must match.",
    )
    lr_scale: float = Field(
        default=1.0, ge=0, description="Times the learning rate of the schedule; 0 holds them still."
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="In the place of optimizer.weight_decay, for all that match: biases and normalisation weights too. "
        "Default: as without the group.",
    )
    name: str | None = Field(
        default=None, description="What the group is called in what is printed. Default: its patterns."
    )


@dataclass(frozen=True)
class Rule:
    """What holds of some parameters; of `weight_decay` None leaves what they have without it."""

    name: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def assign(groups: Sequence[GroupSection], tensors: Iterable[tuple[str, ...]]) -> Mapping[str, Rule]:
    """Names of parameters to the rule of the first group that matches one of their names.

    Args:
        tensors: of each trained tensor of the whole model all names, a tied one has several.

    Raises:
        RecipeError: a pattern matches nothing, or a group is left nothing by those before it.
    """
    tensors = list(tensors)
    names = [name for each in tensors for name in each]
    problems = [
        Problem(f"optimizer.groups.{index}.match", message)
        for index, group in enumerate(groups)
        for message in misspelt(group.match, names, "that is trained")
    ]
    rules = [Rule(group.name or as_written(group.match), group.lr_scale, group.weight_decay) for group in groups]
    found: dict[str, Rule] = {}
    taken: set[int] = set()
    for each in tensors:
        index = next((i for i, g in enumerate(groups) if any(covers(g.match, name) for name in each)), None)
        if index is not None:
            taken.add(index)
            found.update(dict.fromkeys(each, rules[index]))
    problems += [
        Problem(f"optimizer.groups.{index}", "all that it matches belongs to groups before it; put it before those")
        for index in range(len(groups))
        if not problems and index not in taken
    ]
    if problems:
        raise RecipeError(problems)
    return found
