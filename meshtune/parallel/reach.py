"""Which parameters the gradient of an output reaches, read from its autograd graph without running it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def reached(output: Any) -> set[int]:
    """`id` of every leaf to which a backward from the tensors in `output` gives a gradient."""
    pending = [tensor.grad_fn for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
    seen, leaves = set(), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        pending.extend(parent for parent, _ in node.next_functions)
    return leaves
