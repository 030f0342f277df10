"""Tensor and sequence parallelism: cut a model's parameters, and let its splits sum. Works on meta, before weights exist.

No module is replaced and no forward is changed: parameters become smaller, and hooks at the borders of the splits communicate.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshtune.layout import Group, Layout, Plan
from meshtune.layout.collectives import copy_to, gather_from, reduce_from, share_of
from meshtune.layout.peers import Peers
from meshtune.layout.pieces import Cut, Piece, named_pieces, piece_of, set_piece
from meshtune.parallel.borders import at_entry, at_exit, is_activation
from meshtune.parallel.sequence import cut_sequence


def cut_parameters(root: nn.Module, cuts: dict[str, Cut], layout: Layout) -> None:
    """Put this rank's part in the place of each named parameter, and say on its module which part it is. Tied ones stay tied."""
    parts: dict[int, nn.Parameter] = {}
    for name, cut in cuts.items():
        path, _, leaf = name.rpartition(".")
        module = root.get_submodule(path)
        parameter = module._parameters[leaf]
        assert parameter is not None
        if piece_of(module, leaf) is not None:
            continue
        piece = cut.piece(tuple(parameter.shape), layout.size(cut.axis), layout.rank(cut.axis))
        for owner, own_name in _owners(root, parameter):
            part = parts.setdefault(id(parameter), nn.Parameter(piece.of(parameter.data), parameter.requires_grad))
            owner._parameters[own_name] = part
            set_piece(owner, own_name, piece)


def _owners(root: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    return [(module, name) for module in root.modules() for name, p in module._parameters.items() if p is parameter]


def parallelize(model: nn.Module, plan: Plan, layout: Layout, runs: Sequence[Sequence[str]] = ()) -> None:
    """Apply the rules for the tp axis to `model`, in place. `runs` are the blocks that run one after another on this rank: all
    of them, or those of each pipeline stage."""
    peers = layout.peers("tp")
    sequence = layout.sequence_parallel
    cut_parameters(model, dict(plan.cuts), layout)
    for path, values in plan.attributes.items():
        for name, value in values.items():
            _set_local(model.get_submodule(path), name, value)
    for path, heads in plan.head_inputs.items():
        _take_own_heads(model.get_submodule(path), heads, peers)
    for name in plan.divided:
        path, _, leaf = name.rpartition(".")
        _divide(model.get_submodule(path), leaf, peers.size)
    for path in plan.gathered:
        _gather_features(model.get_submodule(path), peers)
    for path, groups in plan.selected.items():
        _select_features(model.get_submodule(path), groups, peers)
    for path in plan.vocabulary:
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            _look_up_own_rows(module, peers)
    if sequence and plan.units:
        cut_sequence(model, plan, runs or [plan.units], peers)
        return
    copied, shared_out = partial(copy_to, peers=peers), partial(share_of, peers=peers)
    for split in plan.splits:
        for path in split.entries:
            at_entry(model.get_submodule(path), copied, is_activation, shared_out if split.adds else copied)
        for path in split.exits:
            at_exit(model.get_submodule(path), partial(reduce_from, peers=peers))


def shared_parameters(model: nn.Module, plan: Plan, layout: Layout) -> list[str]:
    """The parameters that every tp rank holds whole, with a part of the gradient on each."""
    pieces = named_pieces(model)
    names = [name for name, _ in model.named_parameters() if name not in pieces]
    if layout.size("tp") == 1:
        return []
    if not layout.sequence_parallel:
        return [name for name in names if name in plan.shared]
    inside = tuple(f"{unit}." for unit in plan.units)
    return [name for name in names if name.startswith(inside) or name in plan.shared]


def _set_local(module: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, dict):
        held = copy.copy(getattr(module, name))
        for inner, number in value.items():
            setattr(held, inner, number)
        value = held
    setattr(module, name, value)


def _take_own_heads(module: nn.Module, heads: int, peers: Peers) -> None:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden_states = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return tree_map(partial(one, hidden_states), args), tree_map(partial(one, hidden_states), kwargs)

    def one(hidden_states: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_by_head(value, heads, hidden_states):
            return value
        rows = value.unflatten(0, (-1, heads))
        return rows.chunk(peers.size, 1)[peers.rank].flatten(0, 1)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def _is_by_head(value: Tensor, heads: int, hidden_states: Tensor) -> bool:
    """Whether a tensor is [heads, ...] or [batch * heads, ...], and neither like the hidden states nor a mask [batch, 1, ...] of
    a batch of as many rows as there are heads."""
    batch = hidden_states.shape[0]
    if not value.is_floating_point() or value.ndim < 2 or value.shape == hidden_states.shape:
        return False
    if value.shape[0] == heads:
        return not (batch == heads and value.ndim == 4 and value.shape[1] == 1)
    return value.shape[0] == batch * heads


def _divide(module: nn.Module, name: str, size: int) -> None:
    """Inside the module's forward the parameter is its share of a sum over ranks."""
    whole: list[nn.Parameter] = []

    def before(_module: nn.Module, _args: Any) -> None:
        parameter = module._parameters[name]
        assert parameter is not None
        whole.append(parameter)
        module._parameters[name] = parameter / size  # type: ignore[assignment]

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if whole:
            module._parameters[name] = whole.pop()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _gather_features(module: nn.Module, peers: Peers) -> None:
    def enter(_module: nn.Module, args: Any) -> Any:
        return (gather_from(args[0], args[0].ndim - 1, peers), *args[1:])

    def leave(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        width = output.shape[-1] // peers.size
        return output.narrow(-1, peers.rank * width, width)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _select_features(module: nn.Module, groups: tuple[Group, ...], peers: Peers) -> None:
    spans = [group.span(peers.size, peers.rank) for group in groups]

    def leave(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return torch.cat([output.narrow(-1, start, length) for start, length in spans], -1)

    module.register_forward_hook(leave)


def _look_up_own_rows(module: nn.Embedding, peers: Peers) -> None:
    """Rows of the vocabulary that this rank has; zeros for the others, so that the sum over ranks is the embedding."""
    piece = piece_of(module, "weight")
    assert isinstance(piece, Piece)
    ((start, length),) = piece.spans
    padding = module.padding_idx
    inside = padding is not None and start <= padding < start + length
    own: list[Tensor] = []

    def before(_module: nn.Module, args: Any) -> Any:
        local = args[0] - start
        found = (local >= 0) & (local < length)
        own.append(found)
        module.padding_idx = padding - start if inside else None  # type: ignore[operator]
        return (torch.where(found, local, 0), *args[1:])

    def after(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        found = own.pop()
        module.padding_idx = padding
        return reduce_from(output.masked_fill(~found[..., None], 0.0), peers)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
