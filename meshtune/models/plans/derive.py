"""From a twin's regions and proved choices to the plan of the model itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from meshtune.errors import LayoutError
from meshtune.layout.pieces import Cut
from meshtune.layout.plan import Plan, Sequences
from meshtune.models.blocks import generic, unit_names
from meshtune.models.plans.choices import Choice, Unfit, choices
from meshtune.models.plans.geometry import realise
from meshtune.models.plans.regions import Flow, Part, Region, find_regions, is_linear
from meshtune.models.plans.tables import Role, table_roles

Signature = tuple[str, ...]
Prove = Callable[[str, Plan], str | None]
"""From a block's name and the rules of one of its regions to None, or to why they are wrong."""


@dataclass
class Findings:
    """What a twin showed of each kind of block: its regions and the choice by which each is cut, and what stays whole and why."""

    regions: dict[Signature, list[tuple[Region, Choice]]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    joined_units: frozenset[str] = frozenset()

    def notes(self) -> list[str]:
        """What stays whole, for people."""
        found = [f"{path} stays whole on every tp rank: {reason}" for path, reason in self.whole.items()]
        if self.joined_units:
            layers = sorted(self.joined_units, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
            found.append(f"layers that share keys or indices stay on one pipeline stage: {layers[0]} to {layers[-1]}")
        return found


def find(
    twin: PreTrainedModel, flows: Mapping[str, Flow], asked: Mapping[str, Role], size: int, prove: Prove
) -> Findings:
    """Regions and choices of every kind of block of `twin`, each proved; `asked` are roles that the recipe gives layers.

    Raises LayoutError if nothing at all can be cut, or something not as it is asked for.
    """
    roles = {**table_roles(twin), **asked}
    found = Findings()
    for unit in unit_names(twin):
        block = twin.get_submodule(unit)
        signature = signature_of(block)
        if signature in found.regions:
            continue
        own_roles = {n.removeprefix(f"{unit}."): role for n, role in roles.items() if n.startswith(f"{unit}.")}
        found.regions[signature] = []
        for region in find_regions(block, flows[unit], own_roles):
            choice, reason = _choose(region, unit, block, twin.config, size, prove)
            if choice is not None:
                found.regions[signature].append((region, choice))
            else:
                found.whole[generic(f"{unit}.{region.path}")] = reason
        _check_asked(unit, asked, found, signature)
    _check_inside_blocks(unit_names(twin), asked)
    found.whole.update(
        {generic(name): "distributed.plan says so" for name, role in asked.items() if role == "replicate"}
    )
    if not any(found.regions.values()):
        reasons = (
            "; ".join(f"{path}: {reason}" for path, reason in found.whole.items())
            or "no layers that feed each other were found"
        )
        raise LayoutError(
            f"distributed.tp_size: no layer of {type(twin).__name__} can be cut ({reasons}); write tp_size: 1, or say in "
            "distributed.plan which layers are colwise and which rowwise"
        )
    return found


def _check_asked(unit: str, asked: Mapping[str, Role], found: Findings, signature: Signature) -> None:
    """Raises LayoutError if the recipe gives a layer a role that it does not have."""
    actual: dict[str, Role] = {}
    for region, _ in found.regions[signature]:
        for part in region.parts:
            if isinstance(part, Part):
                actual.update(dict.fromkeys(part.columns, "column"))
                actual[part.row] = "row"
            else:
                actual.update(dict.fromkeys((f"{part.parent}.{name}" for name in part.columns), "column"))
                actual.update(dict.fromkeys((f"{part.parent}.{name}" for name in part.rows), "row"))
    styles = {"column": "colwise", "row": "rowwise", "replicate": "replicate"}
    for name, role in asked.items():
        own = name.removeprefix(f"{unit}.")
        if own == name or actual.get(own, "replicate") == role:
            continue
        reasons = (text for path, text in found.whole.items() if generic(name).startswith(path))
        reason = next(reasons, "the layers that it feeds, or is fed by, do not fit that")
        raise LayoutError(f"distributed.plan: {generic(name)} cannot be {styles[role]}: {reason}")


def _check_inside_blocks(units: list[str], asked: Mapping[str, Role]) -> None:
    for name, role in asked.items():
        if role != "replicate" and not any(name.startswith(f"{unit}.") for unit in units):
            raise LayoutError(
                f"distributed.plan: {name} is in none of the model's repeated blocks, and only their layers are cut by it"
            )


def _choose(
    region: Region, unit: str, block: nn.Module, config: PreTrainedConfig, size: int, prove: Prove
) -> tuple[Choice | None, str]:
    reason = "its shapes do not say how"
    tried: list[Plan] = []
    for choice in choices():
        try:
            plan = realise(region, block, config, choice, size)
        except Unfit as unfit:
            reason = str(unfit) if not tried else reason
            continue
        except LayoutError as error:
            raise LayoutError(f"distributed.tp_size: {type(block).__name__}.{region.path}: {error}") from error
        if plan in tried:
            continue
        tried.append(plan)
        problem = prove(unit, plan)
        if problem is None:
            return choice, ""
        reason = problem if len(tried) == 1 else reason
    return None, reason


def declare(model: PreTrainedModel, findings: Findings, size: int) -> Plan:
    """The plan of `model` (on meta, whole) for `size` tp ranks.

    Raises LayoutError where heads or widths cannot be shared out, or for a kind of block that the twin did not show.
    """
    units = unit_names(model)
    plan = Plan(units=tuple(units), sequences=findings.sequences)
    if size == 1:
        return plan
    parts, problems = [], defaultdict(list)
    for unit in units:
        block = model.get_submodule(unit)
        known = findings.regions.get(signature_of(block))
        if known is None:
            raise LayoutError(f"distributed.tp_size: {unit} is a kind of block that was not tried")
        for region, choice in known:
            try:
                parts.append(realise(region, block, model.config, choice, size).under(unit))
            except (LayoutError, Unfit) as error:
                problems[f"{re.sub(r'[.][0-9]+$', '.*', unit)}.{region.path}: {error}"].append(unit)
        parts.append(Plan(whole=tuple(_whole(block, [region for region, _ in known]))).under(unit))
    if problems:
        raise LayoutError(
            "\n".join(f"distributed.tp_size: {text}; write a tp_size that divides it" for text in problems)
        )
    return plan.joined(*parts, vocabulary(model))


def _whole(block: nn.Module, regions: list[Region]) -> list[str]:
    """Children of a block that hold matrices and are in no region: what they compute at a position may depend on others."""
    cut = {region.path for region in regions}
    layers = {
        name
        for region in regions
        for part in region.parts
        if isinstance(part, Part)
        for name in (*part.columns, part.row)
    }
    return [
        name
        for name, child in block.named_children()
        if name not in cut
        and not any(layer == name or layer.startswith(f"{name}.") for layer in layers)
        and any(p.ndim > 1 for p in child.parameters())
        and not is_linear(child)
    ]


def vocabulary(model: PreTrainedModel) -> Plan:
    """Input embedding and head cut by rows of the vocabulary, where they are an embedding and a dense layer."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return Plan()
    if embedding.weight.shape[0] != head.weight.shape[0]:
        return Plan()
    cuts: dict[str, Cut] = {}
    paths = [_path(model, embedding), _path(model, head)]
    for path, module in zip(paths, (embedding, head), strict=True):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                cuts[f"{path}.{leaf}"] = Cut("tp", 0, (parameter.shape[0],))
    return Plan(cuts=cuts, vocabulary=tuple(paths))


def _path(model: nn.Module, module: nn.Module | None) -> str:
    return next((name for name, candidate in model.named_modules() if candidate is module), "")


def signature_of(block: nn.Module) -> Signature:
    """The names of a block's parameters, members of lists taken for one: blocks of one kind have the same, in a twin as well."""
    return tuple(sorted({re.sub(r"\.\d+\.", ".*.", name) for name, _ in block.named_parameters()}))
