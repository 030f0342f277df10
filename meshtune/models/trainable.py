"""Which parameters of a model are trained: chosen once on the whole model, then the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshtune.config.patterns import Patterns, covers, misspelt
from meshtune.errors import ModelError

__all__ = ["Trained", "by_patterns", "find_trained", "freeze", "tensor_names"]


@dataclass(frozen=True)
class Trained:
    """What is trained of a whole model; call it with a name to ask of one parameter.

    Attributes:
        names: of trained parameters, a tied one under each of its names.
        tensors: how many there are, a tied one once.
        elements: numbers in them.
        total: numbers in all parameters of the model.
    """

    names: frozenset[str]
    tensors: int
    elements: int
    total: int

    def __call__(self, name: str) -> bool:
        return name in self.names

    def summary(self) -> str:
        """The counts in a line."""
        share = 100 * self.elements / max(self.total, 1)
        return f"{self.elements:,} of {self.total:,} parameters ({share:.3g} %), in {self.tensors} tensors; all others are frozen"

    def as_dict(self) -> dict[str, Any]:
        """The counts, for a manifest."""
        return {"trained_parameters": self.elements, "trained_tensors": self.tensors, "parameters": self.total}


def find_trained(model: nn.Module, trained: Callable[[str], bool]) -> Trained:
    """What `trained` chooses of a whole model (on meta, before anything is cut); the model is not changed.

    A tied parameter is trained if `trained` says so of one of its names. Raises ModelError if it chooses none.
    """
    chosen = {names: p for names, p in tensor_names(model).items() if any(map(trained, names))}
    if not chosen:
        raise ModelError("the model has no trainable parameter: every one is frozen; leave at least one unfrozen")
    everything = sum(p.numel() for p in model.parameters())
    names = frozenset(name for names in chosen for name in names)
    return Trained(names, len(chosen), sum(p.numel() for p in chosen.values()), everything)


def freeze(model: nn.Module, trained: Callable[[str], bool]) -> None:
    """Let this rank's parameters require gradients where `trained` says so, and nowhere else.

    Call it after the weights are loaded (loading lets everything require them) and before data parallelism looks at them.
    A rank may be left without any, as a stage of a pipeline is where only another one trains.
    """
    for names, parameter in tensor_names(model).items():
        parameter.requires_grad_(any(map(trained, names)))


def by_patterns(model: nn.Module, trainable: Patterns | None, frozen: Patterns | None) -> Callable[[str], bool]:
    """The choice of `model.trainable` (None: all) less `model.freeze` (None: nothing).

    A tied parameter is named by any of its names. Raises ModelError for a pattern that names no parameter, or if nothing is left.
    """
    named = tensor_names(model)
    everything = [name for names in named for name in names]
    for key, patterns in (("trainable", trainable), ("freeze", frozen)):
        if patterns is not None and (wrong := list(misspelt(patterns, everything))):
            raise ModelError("\n".join(f"model.{key}: {message}" for message in wrong))

    def chosen(names: tuple[str, ...]) -> bool:
        wanted = trainable is None or any(covers(trainable, name) for name in names)
        return wanted and not (frozen is not None and any(covers(frozen, name) for name in names))

    left = {name for names in named if chosen(names) for name in names}
    if not left:
        raise ModelError("model.freeze: leaves no parameter to train; leave at least one unfrozen")
    return left.__contains__


def tensor_names(model: nn.Module) -> Mapping[tuple[str, ...], nn.Parameter]:
    """Each parameter once, by all of its names, in the order of the model."""
    names: dict[int, list[str]] = {}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return {tuple(names[key]): parameter for key, parameter in parameters.items()}
