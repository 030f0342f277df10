"""The plan of a model with an adapter, from that of the bare model: docs/adapters.md shows the rules as a table.

A split is a sum over ranks, and an adapter adds `B A x` inside it. So B is cut as the outputs of its layer are, and A as the
inputs; what is not cut, each rank holds whole, with a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from meshtune.errors import LayoutError
from meshtune.layout import Plan
from meshtune.layout.experts import Around, Experts
from meshtune.layout.pieces import Cut
from meshtune.models.adapters.copies import with_copies
from meshtune.models.adapters.view import inner_paths

NAME = "default"
"""What PEFT calls an adapter in the names of its parameters."""


@dataclass
class _Rows:
    """What is added to a plan."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


def adapted(plan: Plan, model: nn.Module) -> Plan:
    """The plan of `model` (whole, on meta, with an adapter) from `plan`, which was declared of the bare model.

    Raises LayoutError for a layer that the plan cuts in a way that no adapter can follow.
    """
    moved = inner_paths(model)
    if not moved:
        return plan
    plan, rows = with_copies(plan, model), _Rows()
    for path, inner in moved.items():
        for wrapper, module in _wrappers(model, path, inner):
            _add(rows, plan, path, inner, wrapper, module, model)

    def name_of(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return f"{moved[path]}.{leaf}" if path in moved else name

    return replace(
        plan,
        cuts={**{name_of(name): cut for name, cut in plan.cuts.items()}, **rows.cuts},
        shared=frozenset(map(name_of, plan.shared)) | rows.shared,
        divided=frozenset(map(name_of, plan.divided)),
        attributes={moved.get(path, path): values for path, values in plan.attributes.items()},
        vocabulary=tuple(moved.get(path, path) for path in plan.vocabulary),
        experts=tuple(_with_adapter(found, model, moved) for found in plan.experts),
        wrapped=moved,
    )


def _wrappers(model: nn.Module, path: str, inner: str) -> Iterator[tuple[str, nn.Module]]:
    """What PEFT has put around the module at `inner`, outermost first."""
    parts = inner.removeprefix(f"{path}.").split(".")
    for count in range(len(parts)):
        at = ".".join((path, *parts[:count]))
        yield at, model.get_submodule(at)


def _add(rows: _Rows, plan: Plan, path: str, inner: str, wrapper: str, module: nn.Module, model: nn.Module) -> None:
    """The rows of one wrapper of the module that was at `path`."""
    base = model.get_submodule(inner)
    if (parameter := getattr(module, "parameter_name", None)) is not None:
        _add_stacked(rows, plan, f"{path}.{parameter}", wrapper, module, base)
    elif isinstance(base, nn.Embedding) and NAME in getattr(module, "lora_embedding_A", ()):
        _add_embedding(rows, plan, path, wrapper)
    elif NAME in getattr(module, "lora_A", ()):
        has_magnitude = NAME in getattr(module, "lora_magnitude_vector", ())
        _add_layer(rows, plan, path, wrapper, base, has_magnitude)


def _add_layer(rows: _Rows, plan: Plan, path: str, wrapper: str, base: nn.Module, has_magnitude: bool) -> None:
    """A dense layer: weight [out, in], or [in, out] of a Conv1D; A is [r, in], B [out, r] and a magnitude [out] for both."""
    first, second = f"{wrapper}.lora_A.{NAME}.weight", f"{wrapper}.lora_B.{NAME}.weight"
    magnitude = [f"{wrapper}.lora_magnitude_vector.{NAME}.weight"] * has_magnitude
    weight = f"{path}.weight"
    cut = plan.cuts.get(weight)
    if cut is None:
        if weight in plan.shared:
            rows.shared |= {first, second, *magnitude}
        return
    by_outputs = (cut.dim % 2 == 0) != isinstance(base, Conv1D)
    _cut_one(rows, cut, (first, second), by_outputs)
    if magnitude and by_outputs:
        rows.cuts[magnitude[0]] = Cut(cut.axis, 0, cut.blocks, cut.unit)
    else:
        rows.shared |= {*magnitude}


def _cut_one(rows: _Rows, cut: Cut, pair: tuple[str, str], by_outputs: bool) -> None:
    first, second = pair
    if by_outputs:
        rows.cuts[second] = Cut(cut.axis, 0, cut.blocks, cut.unit)
        rows.shared.add(first)
    else:
        rows.cuts[first] = Cut(cut.axis, 1, cut.blocks, cut.unit)
        rows.shared.add(second)


def _add_embedding(rows: _Rows, plan: Plan, path: str, wrapper: str) -> None:
    """Outside splits every tp rank looks up the same rows, so that both matrices, [r, vocabulary] and [hidden, r], stay whole and
    their gradients complete, also where the embedding itself is cut by its rows."""
    weight = f"{path}.weight"
    if weight in plan.cuts and path not in plan.vocabulary:
        raise LayoutError(
            f"peft.target_modules: {path} is an embedding that tensor parallelism cuts by its features, for which an adapter has "
            "no rule; leave it out, or write tp_size: 1"
        )
    if weight in plan.shared:
        rows.shared |= {f"{wrapper}.lora_embedding_A.{NAME}", f"{wrapper}.lora_embedding_B.{NAME}"}


def _add_stacked(rows: _Rows, plan: Plan, name: str, wrapper: str, module: nn.Module, base: nn.Module) -> None:
    """Stacked weights of experts: A [experts * r, in], expert after expert, and B [out, r * experts], whose columns go through
    the experts for each of the r. A matrix without experts (a router) is one of one."""
    first, second = f"{wrapper}.lora_A.{NAME}.weight", f"{wrapper}.lora_B.{NAME}.weight"
    cut = plan.cuts.get(name)
    if cut is None:
        if name in plan.shared:
            rows.shared |= {first, second}
        return
    ndim, dim = _dimensions(base, name), cut.dim
    outputs = ndim - 2 if ndim == 2 or module._did_swap_in_out_features else ndim - 1
    if dim % ndim not in (ndim - 2, ndim - 1):
        raise LayoutError(
            f"peft.target_parameters: {name} is cut by dimension {dim}, for which an adapter has no rule; leave it out, or write "
            "tp_size: 1"
        )
    _cut_one(rows, cut, (first, second), dim % ndim == outputs)


def _dimensions(base: nn.Module, name: str) -> int:
    parameter = base._parameters[name.rpartition(".")[2]]
    assert parameter is not None
    return parameter.ndim


def _with_adapter(found: Experts, model: nn.Module, moved: Mapping[str, str]) -> Experts:
    """Experts that an axis shares out take their part of the adapter with them."""
    if found.path not in moved:
        return found
    around = []
    for wrapper, module in _wrappers(model, found.path, moved[found.path]):
        layer = cast(Any, module)
        rank, count = int(layer.r[NAME]), int(layer.num_experts)
        cuts = {
            f"{wrapper}.lora_A.{NAME}.weight": Cut("ep", 0, (rank * count,), rank),
            f"{wrapper}.lora_B.{NAME}.weight": Cut("ep", 1, (count,) * rank),
        }
        around.append(Around(wrapper, cuts, ("num_experts",)))
    return replace(found, path=moved[found.path], around=tuple(around))
