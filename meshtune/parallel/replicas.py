"""DDP: a full copy on each rank, whose gradients are averaged; nothing where one rank is all there is.

Where the gradient does not reach every parameter (those of a router's balance, of a tower that text does not use), DDP must
be told to look; told so of any other model, it walks each step's graph in vain, and torch warns. The first training forward
shows which of the two a model is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshtune.layout import Layout
from meshtune.parallel.reach import reached


class Replicas:
    """Calls `root`, which DDP wraps at the first training forward."""

    def __init__(self, root: nn.Module, layout: Layout):
        self._root = _Root(root)
        self._layout = layout
        self._last = True
        self._ddp: DistributedDataParallel | None = None

    def __call__(self, *args: Any) -> Any:
        if self._layout.size("loss") == 1 or not torch.is_grad_enabled():
            return self._root(*args)
        if self._ddp is None:
            self._ddp = self._wrap(args)
        self._ddp.require_backward_grad_sync = self._last
        return self._ddp(*args)

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return self._layout.size("loss")

    def set_last_micro_batch(self, last: bool) -> None:
        """Only the backward after the last one averages."""
        self._last = last

    def settled_late(self) -> tuple[str, ...]:
        """No gradient is settled after the backward."""
        return ()

    def settle_gradients(self) -> None:
        """DDP leaves a parameter that no rank reached without a gradient."""

    def _wrap(self, args: tuple[Any, ...]) -> DistributedDataParallel:
        self._root.output = self._root(*args)
        leaves = reached(self._root.output)
        missing = any(id(p) not in leaves for p in self._root.parameters() if p.requires_grad)
        anywhere = torch.tensor(int(missing), device=next(self._root.parameters()).device)
        group = self._layout.group("loss")
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        # Weights are equal as they were loaded, buffers follow from the config: there is nothing to synchronise.
        return DistributedDataParallel(
            self._root,
            process_group=group,
            init_sync=False,
            forward_sync_buffers=False,
            find_unused_parameters=bool(anywhere),
        )


class _Root(nn.Module):
    """The root module; gives an output that is there already, once, instead of computing it again."""

    def __init__(self, root: nn.Module):
        super().__init__()
        self.root = root
        self.output: Any = None

    def forward(self, *args: Any) -> Any:
        if self.output is None:
            return self.root(*args)
        output, self.output = self.output, None
        return output
