"""Where a model keeps its experts, known by structure: whatever the architecture, a module with parameters `[experts, ...]`,
an integer attribute that counts them, and a forward that is told by its caller where tokens go: `(hidden_states, index,
weights)`, or `(hidden_states)` with as many rows for each expert, one expert after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from meshtune.errors import ModelError
from meshtune.layout.experts import Experts


def experts_modules(model: nn.Module) -> list[Experts]:
    """The experts of `model`, in the order of its modules; none for a dense model.

    Raises ModelError if it has experts that are kept in another way, naming them.
    """
    found, others = [], []
    for path, module in model.named_modules():
        if _is_list_of_experts(path, module):
            others.append(f"{path} is a list of {len(module)} modules")
        elif counters := dict(_counters(module)):
            reason = _misfit(module, counters)
            if reason is None:
                found.append(_describe(path, module, counters))
            else:
                others.append(f"{path} ({type(module).__name__}) {reason}")
    if others:
        raise ModelError(
            f"distributed.ep_size: {type(model).__name__} keeps its experts in a way that cannot be shared out: {others[0]}, "
            "where one module with parameters [experts, ...] and forward(hidden_states, index, weights) can; write `ep_size: 1`"
        )
    return found


def _is_list_of_experts(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2]
    return isinstance(module, nn.ModuleList) and "experts" in name and "shared" not in name and len(module) > 1


def _counters(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Integer attributes that count the slices of stacked matrices. Experts that every token visits are not routed to."""
    stacked = {len(p) for p in module._parameters.values() if p is not None and p.ndim >= 3}
    for name, value in vars(module).items():
        if type(value) is int and value in stacked and "experts" in name and "shared" not in name:
            yield name, value


def _misfit(module: nn.Module, counters: dict[str, int]) -> str | None:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    sizes = {len(p) if p.ndim > 1 else None for p in own.values()}
    if len(set(counters.values())) != 1 or sizes != set(counters.values()):
        return "has parameters that do not all count the same experts in dimension 0"
    if shared := [name for name, child in module.named_children() if next(child.parameters(), None) is not None]:
        return f"has parameters that its experts share ({shared[0]})"
    arguments = _arguments(module)
    # Rows of zeros, for tokens that go to other experts, are to give zeros: there is no bias.
    if len(arguments) != 3 and not (len(arguments) == 1 and all(p.ndim > 2 for p in own.values())):
        return f"is called with ({', '.join(arguments)})"
    return None


def _arguments(module: nn.Module) -> list[str]:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.name != "self" and p.kind is p.POSITIONAL_OR_KEYWORD]


def _describe(path: str, module: nn.Module, counters: dict[str, int]) -> Experts:
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    return Experts(path, next(iter(counters.values())), names, tuple(counters), len(_arguments(module)) == 1)
