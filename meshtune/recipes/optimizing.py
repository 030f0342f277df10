"""Which parameters learn how: decided on the whole model, before it is cut; then the optimizer of each rank's part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshtune.errors import Problem, RecipeError
from meshtune.optim.groups import Rule, assign, faster_b
from meshtune.optim.methods import METHODS
from meshtune.recipes import adapting, quantizing

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshtune.layout import Layout
    from meshtune.models.source import Source
    from meshtune.models.trainable import Trained
    from meshtune.optim.section import OptimizerSection
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import Setup

__all__ = ["Learning", "build", "check_patterns", "choose", "evaluated", "lines_of", "problems", "say"]

# PEFT's create_loraplus_optimizer has the same.
_EMBEDDING_RATE = 1e-6


@dataclass(frozen=True)
class Learning:
    """What `optimizer` and LoRA+ say of each trained parameter.

    Attributes:
        rules: of those in groups, by name.
        parts: `muon` or `adamw`, of each by name, where the optimizer is both.
        lines: for people.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, message) of what an optimizer cannot go with in a recipe."""
    if recipe.optimizer.name == "schedule_free_adamw" and recipe.lr_scheduler.name != "constant":
        yield (
            "lr_scheduler.name",
            f"{recipe.lr_scheduler.name} lowers the learning rate, which schedule_free_adamw does by averaging weights; write "
            "`name: constant` (a warm-up is good)",
        )
    if recipe.peft is not None and recipe.peft.loraplus_lr_ratio is not None and recipe.training.learning_rate == 0:
        yield "peft.loraplus_lr_ratio", "has no effect with training.learning_rate: 0; leave it out"
    if recipe.distributed.strategy != "megatron_fsdp":
        return
    if recipe.optimizer.name not in ("adamw", "sgd"):
        yield (
            "optimizer.name",
            f"{recipe.optimizer.name} is not made for strategy: megatron_fsdp; write `strategy: fsdp2`",
        )
    for key in ("trainable", "freeze"):
        if recipe.peft is None and getattr(recipe.model, key) is not None:
            yield f"model.{key}", "megatron_fsdp does not hold frozen weights beside trained ones; fsdp2 and ddp do"


def check_patterns(recipe: Recipe, source: Source) -> None:
    """Raises RecipeError or ModelError for a pattern that matches nothing, before rows are read. With an adapter, whose names are
    not known yet, that is left to `choose`."""
    patterns = recipe.optimizer.groups or recipe.model.trainable is not None or recipe.model.freeze is not None
    if recipe.peft is None and patterns:
        from meshtune.models import hf

        lines_of(recipe, hf.build(source, "eager"))


def lines_of(recipe: Recipe, model: Any) -> list[str]:
    """What is trained of the whole meta `model`, and how, for people; nothing where that is all of it in one way."""
    trained = adapting.trained(model, recipe.model)
    counted = None if trained is None else quantizing.counted(trained, model)
    lines = [] if counted is None else [f"trained     {counted.summary()}"]
    return [*lines, *choose(recipe, model, trained).lines]


def choose(recipe: Recipe, model: Any, trained: Trained | None) -> Learning:
    """For the whole `model` on meta, its adapter in it, of which `trained` (None: everything) is trained.

    Raises RecipeError for a group that matches nothing, before any weight is read.
    """
    from meshtune.models.trainable import tensor_names

    tensors = {
        names: parameter
        for names, parameter in tensor_names(model).items()
        if trained is None or any(map(trained, names))
    }
    section = recipe.optimizer
    rules = assign(section.groups, tensors)
    parts = _parts(model, tensors, rules) if section.name == "muon" else {}
    if parts:
        _check_keys(section, parts)
    if recipe.peft is not None and recipe.peft.loraplus_lr_ratio is not None:
        dimensions = {name: parameter.ndim for names, parameter in tensors.items() for name in names}
        rate = _EMBEDDING_RATE if recipe.peft.loraplus_lr_embedding is None else recipe.peft.loraplus_lr_embedding
        scale = rate / recipe.training.learning_rate
        rules = faster_b(rules, dimensions, recipe.peft.loraplus_lr_ratio, scale)
    return Learning(rules, parts, tuple(_lines(tensors, rules, parts)))


def say(setup: Setup) -> None:
    """Print what is trained, and how, and keep it in the run folder; nothing where that is all in one way."""
    from meshtune.recipes.folder import add_to_layout

    trained, lines = setup.trained, setup.learning.lines
    if trained is not None:
        print(f"trained     {trained.summary()}", flush=True)
        add_to_layout(setup.run, trained.as_dict())
    if lines:
        print("\n".join(lines), flush=True)
        add_to_layout(setup.run, {"learning": [" ".join(line.split()) for line in lines]})


def build(recipe: Recipe, model: nn.Module, learning: Learning, layout: Layout) -> torch.optim.Optimizer:
    """The optimizer of this rank's part of the sharded `model`. Every rank must call it."""
    from meshtune.models.placing import local_of, positions
    from meshtune.optim.build import Known

    known = Known(learning.rules, learning.parts, positions(model), others=layout.size("pp") > 1, local=local_of)
    return recipe.optimizer.build(model.named_modules(), recipe.training.learning_rate, known)


@contextmanager
def evaluated(optimizer: torch.optim.Optimizer, root: nn.Module) -> Iterator[None]:
    """Inside, the weights of `root` are those to be evaluated and exported, which some optimizers keep beside."""
    from torch.distributed.fsdp import FSDPModule

    from meshtune.optim.averaging import averaged, averages

    with averaged(optimizer):
        yield
    for module in root.modules() if averages(optimizer) else ():
        if isinstance(module, FSDPModule):
            module.reshard()  # what it has gathered for an evaluation are not the weights of training


def _parts(model: Any, tensors: Mapping[tuple[str, ...], nn.Parameter], rules: Mapping[str, Rule]) -> dict[str, str]:
    """Hidden matrices, also stacked ones of experts, to muon; embeddings, head, vectors and convolutions to adamw."""
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    outside = {id(p) for module in model.modules() if isinstance(module, nn.Embedding | _ConvNd) for p in _own(module)}
    head = model.get_output_embeddings()
    outside |= set() if head is None else {id(p) for p in head.parameters()}
    found, wrong = {}, []
    for names, parameter in tensors.items():
        is_matrix = parameter.ndim in (2, 3)
        hidden = is_matrix and id(parameter) not in outside and not any("lora_embedding_" in name for name in names)
        rule = rules.get(names[0])
        part = (None if rule is None else rule.name) or ("muon" if hidden else "adamw")
        if part == "muon" and not is_matrix:
            wrong.append(f"{names[0]} has {parameter.ndim} dimensions; muon needs matrices")
        found.update(dict.fromkeys(names, part))
    if wrong:
        raise RecipeError([Problem("optimizer.groups", message) for message in wrong])
    return found


def _check_keys(section: OptimizerSection, parts: Mapping[str, str]) -> None:
    """Raises RecipeError for keys of the one of muon's two optimizers that has no parameter."""
    for part, other in (("muon", "adamw"), ("adamw", "muon")):
        if part not in parts.values():
            keys = METHODS["adamw"].keys if part == "adamw" else METHODS["muon"].keys - METHODS["adamw"].keys
            message = f"has no effect: {other} takes all that is trained; leave it out"
            given = [key for key in sorted(keys) if getattr(section, key) is not None]
            if given:
                raise RecipeError([Problem(f"optimizer.{key}", message) for key in given])


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _lines(
    tensors: Mapping[tuple[str, ...], nn.Parameter], rules: Mapping[str, Rule], parts: Mapping[str, str]
) -> Iterator[str]:
    for part in ("muon", "adamw"):
        if parts:
            what = "hidden matrices" if part == "muon" else "embeddings, head and the rest"
            yield f"optimizer   {part}: {_count(p for n, p in tensors.items() if parts[n[0]] == part)} ({what})"
    for rule in dict.fromkeys(rules.values()):
        says = [f"learning rate x {rule.lr_scale:g}"]
        says += [] if rule.weight_decay is None else [f"weight decay {rule.weight_decay:g}"]
        says += [] if rule.name is None else [rule.name]
        members = (p for names, p in tensors.items() if rules.get(names[0]) == rule)
        yield f"group       {rule.match}: {_count(members)}, {', '.join(says)}"


def _count(parameters: Iterator[nn.Parameter]) -> str:
    sizes = [parameter.numel() for parameter in parameters]
    return f"{sum(sizes):,} parameters in {len(sizes)} tensors"
