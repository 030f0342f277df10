"""`optimizer.groups`: parameters that learn at another rate, or decay otherwise, named by patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.config.patterns import as_written, covers, misspelt
from meshtune.errors import Problem, RecipeError

__all__ = ["GroupSection", "Rule", "assign", "faster_b"]


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
    name: Literal["muon", "adamw"] | None = Field(
        default=None,
        description="Which of its two optimizers `muon` takes for them. Default: muon for hidden matrices, adamw for the rest.",
    )


@dataclass(frozen=True)
class Rule:
    """What holds of some parameters; of `weight_decay` None leaves what they have without it."""

    match: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    name: str | None = None


def assign(groups: Sequence[GroupSection], tensors: Iterable[tuple[str, ...]]) -> dict[str, Rule]:
    """Names of parameters to the rule of the first group that matches one of their names.

    Args:
        tensors: of each trained tensor of the whole model all names, a tied one has several.

    Raises:
        RecipeError: a pattern matches nothing, or a group is left nothing by those before it.
    """
    tensors = list(tensors)
    names = [name for each in tensors for name in each]
    problems = [
        Problem(f"optimizer.groups[{index}].match", message)
        for index, group in enumerate(groups)
        for message in misspelt(group.match, names, "that is trained")
    ]
    rules = [Rule(as_written(group.match), group.lr_scale, group.weight_decay, group.name) for group in groups]
    found: dict[str, Rule] = {}
    taken: set[int] = set()
    for each in tensors:
        index = next((i for i, g in enumerate(groups) if any(covers(g.match, name) for name in each)), None)
        if index is not None:
            taken.add(index)
            found.update(dict.fromkeys(each, rules[index]))
    problems += [
        Problem(f"optimizer.groups[{index}]", "all that it matches belongs to groups before it; put it before those")
        for index in range(len(groups))
        if not problems and index not in taken
    ]
    if problems:
        raise RecipeError(problems)
    return found


def faster_b(
    rules: Mapping[str, Rule], dimensions: Mapping[str, int], ratio: float, embedding_scale: float
) -> dict[str, Rule]:
    """LoRA+ (Hayou et al. 2024, arXiv 2402.12354) on top of `rules`, with the parameters that PEFT's
    `create_loraplus_optimizer` chooses.

    Args:
        dimensions: of each trained parameter by name.
        ratio: times the rate of A for B and for vectors.
        embedding_scale: times the rate for both matrices of an embedding.
    """
    found = dict(rules)
    for name, count in dimensions.items():
        factor = embedding_scale if "lora_embedding_" in name else ratio if "lora_B" in name or count == 1 else 1.0
        if factor != 1.0:
            rule = found.get(name, Rule("LoRA+"))
            found[name] = replace(rule, lr_scale=rule.lr_scale * factor)
    return found
