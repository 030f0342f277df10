"""Which layers and parameters of a model an adapter is for: found on the bare meta model, before any weight is read.

PEFT passes over in silence a name that matches nothing beside one that matches something. Here every pattern must say something,
and what is found is given to PEFT by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.config.patterns import Patterns, as_written, matches, nearest_names
from meshtune.errors import ModelError, Problem, RecipeError
from meshtune.models.adapters.section import TARGET_MODULES, AdapterSection
from meshtune.models.blocks import generic
from meshtune.models.experts import experts_modules

_SHOWN = 8
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Facts:
    """What is known of a model's layers beyond their classes.

    Attributes:
        unused: layers, their numbers written as `*`, whose forward the model does not call, so that an adapter would do nothing.
        nonlinear: layers that are linear by class and compute something else.
        rewritten: layers that PEFT would take for others, by the names that they had in older versions of transformers.
        refused: layers that PEFT does not adapt in this architecture, since kernels read their weights.
    """

    unused: Collection[str] = ()
    nonlinear: Collection[str] = ()
    rewritten: Collection[str] = ()
    refused: Collection[str] = ()

    def against(self, path: str) -> str | None:
        """Why the layer at `path` cannot have an adapter, or None."""
        if path in self.nonlinear:
            return "computes something else than a matrix product"
        if path in self.rewritten:
            return (
                "has a name that PEFT reads as that of experts' stacked weights, so that no file of it could be loaded"
            )
        if path in self.refused:
            return "is not adapted by PEFT in this architecture, whose kernels read its weight without calling it"
        if generic(path) in self.unused:
            return "is never called in a forward of the model, so that an adapter would do nothing"
        return None


@dataclass(frozen=True)
class Targets:
    """Full names: layers, stacked parameters of experts, modules trained whole; and what a user should know of the choice."""

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_targets(section: AdapterSection, model: PreTrainedModel, facts: Facts) -> Targets:
    """What `section`, which names no `adapter`, chooses of a bare model. Raises RecipeError with every problem."""
    return _Finder(section, model, facts).find()


class _Finder:
    def __init__(self, section: AdapterSection, model: PreTrainedModel, facts: Facts):
        self._section, self._facts = section, facts
        self._modules = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
        self._layers = {path: module for path, module in self._modules.items() if is_layer(module)}
        head = model.get_output_embeddings()
        self._heads = {path for path, module in self._modules.items() if module is head}
        self._model = model
        self._problems: list[Problem] = []
        self._notes: list[str] = []

    def find(self) -> Targets:
        section = self._section
        saved = self._saved(section.modules_to_save or [])
        asked = TARGET_MODULES if section.target_modules is None else section.target_modules
        chosen = self._all_linear(saved) if asked == TARGET_MODULES else self._named(asked, saved)
        modules = self._without_excluded(chosen)
        parameters = self._parameters(section.target_parameters or [], modules)
        if not self._problems and not modules and not parameters:
            self._refuse("target_modules", "no layer is left for an adapter; name some, or target_parameters")
        if not self._problems:
            for key in ("rank_pattern", "alpha_pattern"):
                self._check_pattern(key, getattr(section, key) or {}, (*modules, *parameters))
        if self._problems:
            raise RecipeError(self._problems)
        return Targets(tuple(modules), tuple(parameters), tuple(saved), tuple(self._notes))

    def _refuse(self, key: str, message: str) -> None:
        self._problems.append(Problem(f"peft.{key}", message))

    def _all_linear(self, saved: Iterable[str]) -> list[str]:
        linear = [path for path, module in self._layers.items() if not isinstance(module, nn.Embedding)]
        linear = [path for path in linear if path not in self._heads and not _inside(path, saved)]
        reasons = {path: reason for path in linear if (reason := self._facts.against(path)) is not None}
        for reason in dict.fromkeys(reasons.values()):
            kinds = dict.fromkeys(generic(path) for path, other in reasons.items() if other == reason)
            self._notes.append(f"all-linear leaves out {_some(kinds)}: each {reason}")
        return [path for path in linear if path not in reasons]

    def _named(self, patterns: Patterns, saved: Iterable[str]) -> list[str]:
        """A wildcard, or a regular expression, passes over what is no layer; a plain name does not."""
        plain = [] if isinstance(patterns, str) else [p for p in patterns if not _WILD.search(p)]
        others = {path for path in self._modules if path not in self._layers and matches(plain, path)}
        found = self._matched(
            "target_modules", patterns, [p for p in self._modules if p in self._layers or p in others]
        )
        wrong: dict[tuple[str, str], str] = {}
        for path in found:
            if path not in self._layers:
                wrong.setdefault((generic(path), "kind"), f"is {self._what(path)}")
            elif _inside(path, saved):
                wrong.setdefault(
                    (generic(path), "saved"), "is trained whole by modules_to_save; name it in one of the two"
                )
            elif (reason := self._facts.against(path)) is not None:
                wrong.setdefault((generic(path), reason), f"{reason}; leave it out")
        for (path, _), message in list(wrong.items())[:_SHOWN]:
            self._refuse("target_modules", f"{path} {message}")
        return found

    def _what(self, path: str) -> str:
        """Of a module that is no layer."""
        module = self._modules[path]
        kind = type(module).__name__
        inside = [name.removeprefix(f"{path}.") for name in self._layers if name.startswith(f"{path}.")]
        if inside:
            return f"a module with other modules in it ({kind}), not a layer; name its layers: {_some(dict.fromkeys(inside))}"
        stacked = [name for name, p in module._parameters.items() if p is not None and p.ndim >= 2]
        if stacked:
            return f"a {kind}, no linear layer; name its weights in target_parameters: {_some([f'{path}.{n}' for n in stacked])}"
        return f"a {kind}; adapters are for linear layers and embeddings"

    def _without_excluded(self, chosen: list[str]) -> list[str]:
        patterns = self._section.exclude_modules
        if patterns is None:
            return chosen
        excluded = set(self._matched("exclude_modules", patterns, chosen, "of the layers that have an adapter"))
        left = [path for path in chosen if path not in excluded]
        if chosen and not left:
            self._refuse("exclude_modules", "leaves no layer of those that target_modules names")
        return left

    def _saved(self, patterns: list[str]) -> list[str]:
        found = self._matched("modules_to_save", patterns, self._modules)
        for path in found:
            if _inside(path, (other for other in found if other != path)):
                self._refuse("modules_to_save", f"{path} is inside another module that is trained whole")
            if next(self._modules[path].parameters(), None) is None:
                self._refuse("modules_to_save", f"{path} has no parameter")
        return found

    def _parameters(self, patterns: list[str], modules: Collection[str]) -> list[str]:
        if patterns == ["all-experts"]:
            return self._all_experts()
        owners = {
            f"{path}.{leaf}": path
            for path, m in self._modules.items()
            for leaf in m._parameters
            if m._parameters[leaf] is not None
        }
        found = self._matched("target_parameters", patterns, owners)
        for name in found:
            owner, parameter = self._modules[owners[name]], self._model.get_parameter(name)
            stacked = any(p is not None and p.ndim == 3 for p in owner._parameters.values())
            if owners[name] in self._layers:
                self._refuse(
                    "target_parameters", f"{name} is the weight of a layer; name {owners[name]} in target_modules"
                )
            elif parameter.ndim not in (2, 3) or (stacked and parameter.ndim == 2):
                self._refuse(
                    "target_parameters",
                    f"{name} has shape {tuple(parameter.shape)} and is no matrix, nor a stack of them",
                )
            elif generic(owners[name]) in self._facts.unused:
                self._refuse("target_parameters", f"{owners[name]} {self._facts.against(owners[name])}")
        return found

    def _all_experts(self) -> list[str]:
        try:
            experts = experts_modules(self._model)
        except ModelError as error:
            self._refuse("target_parameters", str(error).partition(": ")[2])
            return []
        names = [
            f"{e.path}.{n}"
            for e in experts
            for n in e.parameters
            if self._model.get_parameter(f"{e.path}.{n}").ndim == 3
        ]
        if not names:
            self._refuse("target_parameters", f"{type(self._model).__name__} has no stacked experts; leave it out")
        return names

    def _check_pattern(self, key: str, patterns: Mapping[str, object], targets: Collection[str]) -> None:
        """PEFT's own reading of such a key, which it passes over where it matches nothing."""
        for pattern in patterns:
            try:
                used = any(re.match(rf"(.*\.)?({pattern})$", name) for name in targets)
            except re.error as error:
                self._refuse(key, f"{pattern!r} is not a regular expression: {error}")
                continue
            if not used:
                self._refuse(
                    key, f"{pattern!r} matches none of the layers that have an adapter: {_some(_ends(targets))}"
                )

    def _matched(self, key: str, patterns: Patterns, names: Iterable[str], of: str = "of the model") -> list[str]:
        """Those of `names` that any pattern names; a pattern that names none is a problem."""
        names = list(names)
        each: list[Patterns] = [patterns] if isinstance(patterns, str) else [[pattern] for pattern in patterns]
        found: set[str] = set()
        for pattern in each:
            try:
                own = {name for name in names if matches(pattern, name)}
            except re.error as error:
                self._refuse(key, f"{as_written(pattern)!r} is not a regular expression: {error}")
                continue
            if not own:
                self._refuse(key, self._unmatched(as_written(pattern), names, of))
            found |= own
        return [name for name in names if name in found]

    def _unmatched(self, pattern: str, names: list[str], of: str) -> str:
        near = nearest_names(pattern, names)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {_some(_ends(self._layers))}"
        return f"{pattern!r} matches nothing {of}; {hint}"


def is_layer(module: nn.Module) -> bool:
    """Whether PEFT has a layer of LoRA for it that is cut with it: dense layers and embeddings."""
    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)


def shortest(targets: Collection[str], names: Iterable[str]) -> list[str]:
    """Ends of names for PEFT, which match `targets` and none other of `names`: last parts where that can be, else full names."""
    wanted = set(targets)
    others = {name.rpartition(".")[2] for name in names if name not in wanted}
    return list(dict.fromkeys(end if (end := name.rpartition(".")[2]) not in others else name for name in targets))


def _inside(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in others)


def _ends(names: Iterable[str]) -> Iterator[str]:
    return (name.rpartition(".")[2] for name in names)


def _some(names: Iterable[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
