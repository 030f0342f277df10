"""Layers that mix tokens by other means than attention (recurrences, convolutions), where sequences are cut over ranks.

Such a layer is given the whole sequences of its rank's rows, and each rank keeps what it puts out for its own tokens. Nothing
in it needs to know: its input is gathered, its output cut, by hooks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from meshtune.layout import zigzag
from meshtune.layout.collectives import gather_from
from meshtune.models.blocks import unit_names
from meshtune.models.documents import current_row, enter_whole_row, leave_whole_row


def kinds_of_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the classes of all that is directly in a block and has parameters."""
    children = [child for unit in unit_names(model) for child in model.get_submodule(unit).children()]
    return tuple(
        dict.fromkeys(type(child).__name__ for child in children if next(child.parameters(), None) is not None)
    )


def give_whole_sequences(model: PreTrainedModel, kinds: Collection[str]) -> None:
    """From now on, layers of these classes directly in blocks see whole sequences. They must be causal, and get no padding
    mask: padding is at the end of a row."""
    for unit in unit_names(model):
        for child in model.get_submodule(unit).children():
            if type(child).__name__ in kinds:
                child.register_forward_pre_hook(_join, with_kwargs=True)
                child.register_forward_hook(_keep_own, prepend=True, always_call=True)


def _join(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    context = current_row().context
    if context is None:
        enter_whole_row()
        return args, kwargs
    activations = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > 2]
    rows, length = activations[0].shape[:2]

    def join(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        if value.ndim == 2:  # a mask, which some ranks have and others not
            return None if value.shape[0] == rows else value
        return zigzag.in_sequence(gather_from(value, 1, context.peers), 1, context.peers.size)

    joined = tree_map(join, (args, kwargs))
    enter_whole_row()
    return joined


def _keep_own(_module: nn.Module, _args: Any, output: Any) -> Any:
    context = leave_whole_row().context
    if context is None or output is None:
        return None
    peers = context.peers
    whole = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).shape[1]
    tokens = zigzag.own_tokens(whole, peers.size, peers.rank)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[1] != whole:
            return value
        return value.index_select(1, tokens.to(value.device))

    return tree_map(own, output)
