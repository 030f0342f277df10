"""Which parameters the gradient of an output reaches, read from its autograd graph without running it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def reaches_all(output: Any, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a backward from the tensors in `output` gives every trainable one of `parameters` a gradient."""
    pending = [tensor.grad_fn for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
    seen, reached = set(), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            reached.add(id(leaf))
        pending.extend(parent for parent, _ in node.next_functions)
    return all(id(parameter) in reached for parameter in parameters if parameter.requires_grad)
