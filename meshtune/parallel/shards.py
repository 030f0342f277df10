"""FSDP2: each rank holds a part of every parameter, gathers a block's for its forward and backward, and reduces its gradients.

FSDP2 lays the gradients of a block that a rank has one after another and reduces them as one. If ranks do not reach the same
parameters (experts, or parts for long rows only), it adds up, in silence, gradients of different ones. So it is told to put
zeros in the place of what a rank does not reach. But a zero is not the absence of a gradient: AdamW would let the parameter
decay. Hence what no rank reached in the first training forward loses a gradient that is zero everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtune.errors import TrainingError
from meshtune.layout import Layout
from meshtune.parallel.reach import reached


class Shards:
    """Calls `root`, to which `fully_shard` was applied."""

    def __init__(self, root: nn.Module, layout: Layout):
        assert isinstance(root, FSDPModule)
        self._fills = hasattr(root, "set_reduce_scatter_unused_params")  # from torch 2.13 on
        if self._fills:
            root.set_reduce_scatter_unused_params(True)
        self._sharded: FSDPModule = root
        self._root: nn.Module = root
        self._layout = layout
        self._unreached: list[str] | None = None

    def __call__(self, *args: Any) -> Any:
        output = self._root(*args)
        if self._unreached is None and torch.is_grad_enabled():
            self.watch(reached(output))
        return output

    def watch(self, leaves: set[int]) -> None:
        """Learn which parameters no rank reaches, from the `id`s of the leaves that training reaches on this one."""
        self._unreached = self._find_unreached(leaves)

    @property
    def gradient_divisor(self) -> int:
        """What the reduction divides gradients by; a loss multiplied with it gives the sum over all ranks."""
        return 1

    def set_last_micro_batch(self, last: bool) -> None:
        """Shards are reduced at each micro-batch, so that no full gradient is ever kept; the copies of HSDP at the last."""
        self._sharded.set_requires_all_reduce(last)
        self._sharded.set_is_last_backward(last)

    def settled_late(self) -> Sequence[str]:
        """Names of the parameters that `settle_gradients` looks at."""
        return self._unreached or ()

    def settle_gradients(self) -> None:
        """Take away the gradients that stand for none. Call after the last backward of a step, on every rank."""
        if not self._unreached:
            return
        parameters = [self._root.get_parameter(name) for name in self._unreached]
        present = self._on_any_rank([_holds_a_gradient(parameter) for parameter in parameters])
        for parameter, keep in zip(parameters, present, strict=True):
            if not keep:
                parameter.grad = None

    def _find_unreached(self, leaves: set[int]) -> list[str]:
        found = {name: id(p) in leaves for name, p in self._whole_parameters() if p.requires_grad}
        anywhere = self._on_any_rank(list(found.values()))
        missed = self._on_any_rank([not is_reached for is_reached in found.values()])
        mixed = [name for name, some, none in zip(found, anywhere, missed, strict=True) if some and none]
        if mixed and not self._fills:
            raise TrainingError(
                f"not every rank reaches the same parameters ({', '.join(mixed[:3])}), which fsdp2 reduces rightly from torch "
                "2.13 on; upgrade torch, or use `distributed.strategy: ddp`"
            )
        return [name for name, is_reached in zip(found, anywhere, strict=True) if not is_reached]

    def _whole_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that the graph knows: they exist while a unit is unsharded. The root stays so until its next backward."""
        units = [name for name, module in self._root.named_modules() if name and isinstance(module, FSDPModule)]
        for prefix in units:
            unit = self._root.get_submodule(prefix)
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            yield from ((f"{prefix}.{name}", parameter) for name, parameter in unit.named_parameters())
            unit.reshard()
        self._sharded.unshard()
        for name, parameter in self._root.named_parameters():
            if not any(name.startswith(f"{prefix}.") for prefix in units):
                yield name, parameter

    def _on_any_rank(self, flags: list[bool]) -> list[bool]:
        device = next(self._root.parameters()).device
        shared: Tensor = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._layout.group("loss"))
        return [bool(flag) for flag in shared.tolist()]


def _holds_a_gradient(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and bool(gradient.to_local().any())
