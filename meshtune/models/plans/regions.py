"""Regions of a block that tensor parallelism may cut: layers whose outputs are computed apart and meet in a sum.

Which layer feeds which is read from the autograd graph of one forward of a twin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.models.plans.tables import Role

_HEADS = re.compile(r"^(num_(attention_|attn_|q_)?heads|n_heads?)$")


@dataclass(frozen=True)
class Part:
    """`columns` (layers cut by output features) feed `row` (cut by input features). Names within the block."""

    parent: str
    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True)
class Experts:
    """A module with the weights of all experts in tensors [experts, ...]: `columns` feed `rows`. Names of its parameters."""

    parent: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """Parts inside one child of a block, or in the block itself (path "")."""

    path: str
    parts: tuple[Part | Experts, ...]


@dataclass
class Flow:
    """What one forward of a block showed: layers in the order of their calls, and which of them feed each directly."""

    feeders: dict[str, set[str]] = field(default_factory=dict)


def is_linear(module: nn.Module) -> bool:
    """A dense layer: weight [out, in], or [in, out] for transformers' Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def trace(model: PreTrainedModel, units: list[str], run: Any) -> dict[str, Flow]:
    """Run `run()`, a forward of `model` with gradients, and see how the dense layers of each block feed each other."""
    flows = {unit: Flow() for unit in units}
    handles = []
    for unit in units:
        watcher = _Watcher(flows[unit])
        block = model.get_submodule(unit)
        handles.append(block.register_forward_pre_hook(watcher.enter, with_kwargs=True))
        handles += [
            module.register_forward_hook(watcher.layer(name))
            for name, module in block.named_modules()
            if is_linear(module)
        ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return flows


class _Watcher:
    def __init__(self, flow: Flow):
        self._flow = flow
        self._made: dict[Any, str] = {}
        self._borders: set[Any] = set()

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._made.clear()
        self._borders = {
            leaf.grad_fn for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.grad_fn
        }

    def layer(self, name: str) -> Any:
        def seen(_module: nn.Module, args: Any, output: Tensor) -> None:
            if isinstance(output, Tensor) and isinstance(args[0], Tensor):
                self._flow.feeders.setdefault(name, set()).update(self._sources(args[0].grad_fn))
                self._made[output.grad_fn] = name

        return seen

    def _sources(self, node: Any) -> Iterator[str]:
        pending, seen = [node], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen or node in self._borders:
                continue
            seen.add(node)
            if node in self._made:
                yield self._made[node]
                continue
            pending.extend(parent for parent, _ in node.next_functions)


def find_regions(block: nn.Module, flow: Flow, roles: Mapping[str, Role]) -> list[Region]:
    """The regions of a block, from the roles that tables give its layers (names within the block), else from how they feed
    each other. Roles of `replicate` keep what they name, and all that holds it, out of it."""
    kept = tuple(name for name, role in roles.items() if role == "replicate")
    parts: list[Part | Experts] = [*_dense_parts(block, flow, roles), *_experts(block, roles)]
    parts = [part for part in parts if not _touches(part, kept)]
    regions: dict[str, list[Part | Experts]] = {}
    for part in parts:
        path = "" if isinstance(part, Part) and _holder(block, part.row) != part.parent else part.parent.split(".")[0]
        regions.setdefault(path, []).append(part)
    return [Region(path, tuple(found)) for path, found in regions.items()]


def _touches(part: Part | Experts, kept: tuple[str, ...]) -> bool:
    names = (
        (*part.columns, part.row)
        if isinstance(part, Part)
        else tuple(f"{part.parent}.{n}" for n in part.columns + part.rows)
    )
    return any(name == k or name.startswith(f"{k}.") for name in (part.parent, *names) for k in kept if k)


def _dense_parts(block: nn.Module, flow: Flow, roles: Mapping[str, Role]) -> Iterator[Part]:
    members: dict[str, list[str]] = {}
    for name in flow.feeders:
        members.setdefault(_holder(block, name), []).append(name)
    found = list(_within_modules(members, flow, roles))
    yield from found or _across_modules(block, flow)


def _within_modules(members: Mapping[str, list[str]], flow: Flow, roles: Mapping[str, Role]) -> Iterator[Part]:
    for parent, names in members.items():
        known = {name: roles[name] for name in names if name in roles}
        if "row" in known.values():
            rows = [name for name, role in known.items() if role == "row"]
            columns = tuple(name for name, role in known.items() if role == "column")
            if len(rows) == 1 and columns:
                yield Part(parent, columns, rows[0])
            continue
        yield from _by_flow(parent, names, flow)


def _by_flow(parent: str, names: list[str], flow: Flow) -> Iterator[Part]:
    feeds: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for source in flow.feeders[name] & set(names):
            feeds[source].add(name)
    for row in names:
        sources = flow.feeders[row] & set(names) - {row}
        columns = tuple(name for name in names if name in sources and feeds[name] == {row})
        if columns and not feeds[row]:
            yield Part(parent, columns, row)


def _across_modules(block: nn.Module, flow: Flow) -> Iterator[Part]:
    """For blocks that keep a layer and those that feed it in different modules."""
    feeds: dict[str, set[str]] = {name: set() for name in flow.feeders}
    for name, sources in flow.feeders.items():
        for source in sources:
            feeds[source].add(name)
    used: set[str] = set()
    for row, sources in flow.feeders.items():
        columns = tuple(name for name in flow.feeders if name in sources - used and feeds[name] == {row})
        holders = {_holder(block, name) for name in columns}
        if len(holders) == 1:
            used.update((*columns, row))
            yield Part(holders.pop(), columns, row)


def _holder(block: nn.Module, name: str) -> str:
    """The innermost module with a forward of its own that holds a layer."""
    path = name.rpartition(".")[0]
    while path and isinstance(block.get_submodule(path), nn.ModuleList | nn.ModuleDict | nn.Sequential):
        path = path.rpartition(".")[0]
    return path


def _experts(block: nn.Module, roles: Mapping[str, Role]) -> Iterator[Experts]:
    for path, module in block.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not path or not any(p.ndim == 3 for p in own.values()):
            continue
        known = {name: role for name in own if (role := roles.get(f"{path}.{name}")) is not None}
        if "row" not in known.values():
            known = {}  # tables name the styles of experts that are stored transposed in more than one way
        rows = tuple(name for name in own if _is_row(name, known.get(name)))
        columns = tuple(name for name in own if name not in rows)
        if rows and columns and not list(module.children())[1:]:
            yield Experts(path, columns, rows)


def _is_row(name: str, role: Role | None) -> bool:
    return role == "row" or (role is None and bool(re.search(r"down|^w2|output", name)))


def head_count(module: nn.Module) -> int | None:
    """A module's own count of attention heads, if it has one."""
    return next((v for k, v in vars(module).items() if _HEADS.search(k) and type(v) is int), None)
