"""The load-balancing loss of a model's routers, over the tokens of the global batch, the same on every layout.

The loss depends on how often each expert is chosen by all tokens together, so that is counted first: in the forward itself where
an optimizer step has one, else in a forward before. Once it is known, the gradient is a sum over tokens, and each router's own is
added in its backward, on whatever rank, stage and micro-batch that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.layout import Layout
from meshtune.layout.experts import Balancing
from meshtune.losses.load_balancing import add_balance_gradient, load, load_balancing_loss, no_load, pull


def route_only(model: Any, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """An objective that runs the routers and computes no loss: for counting."""
    hidden_states = model.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask)
    zero = hidden_states.new_zeros((), dtype=torch.float32)
    return zero, zero, {}


class Balance:
    """For each optimizer step: `counting` around the forward of every micro-batch, then `settle`, then the backwards.

    Forwards that carry gradients may be those that are counted (if all come before the first backward) or come after `settle`.
    """

    def __init__(
        self, root: nn.Module, model: nn.Module, declared: Balancing, layout: Layout, shared: Collection[str] = ()
    ):
        """`root` is called with (objective, batch); `shared` names the parameters of `model` of whose gradients each tp rank
        computes a part. Of `declared`, routers that are not on this stage are left out."""
        self._declared, self._layout = declared, layout
        self._counts, self._real = False, torch.empty(0, 0, dtype=torch.bool)
        self._total: Tensor | None = None
        self._pull: Tensor | None = None
        root.register_forward_pre_hook(self._see_batch)
        modules = dict(model.named_modules())
        for path, place in declared.routers.items():
            router = modules.get(path)
            if router is not None and next(router.parameters(), None) is not None:
                partial = any(name.startswith(f"{path}.") for name in shared)
                router.register_forward_hook(_RouterHook(self, place, partial))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forwards inside are counted, once each: not when activation checkpointing runs them again."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def settle(self, gradient_scale: float = 1.0) -> Tensor:
        """Add up what was counted on all ranks; call on every one. From here on backwards have the gradient of

            router_aux_loss_coef * loss

        on top, multiplied with `gradient_scale`: what the reduction of gradients divides by, and the loss scale of float16.
        Returns the loss, 0-d.
        """
        total = no_load(self._declared.experts, self._real.device) if self._total is None else self._total
        total = self._layout.peers("world").all_reduce(total)
        self._total = None
        self._pull = pull(total) * (self._declared.coefficient * gradient_scale)
        return load_balancing_loss(total)

    def see(self, output: Any, place: int, partial: bool) -> Any:
        """The output of a router, its logits at `place`, with the gradient of balance attached."""
        logits = output if isinstance(output, Tensor) else output[place]
        real, everywhere = self._own(logits)
        first = self._layout.rank("tp") == 0
        if self._counts and (first or not everywhere):
            own = load(logits, real, self._declared.top_k)
            self._total = own if self._total is None else self._total + own
        if not logits.requires_grad or (everywhere and partial and not first):
            return output
        if isinstance(output, Tensor):
            return add_balance_gradient(output, output, real, self._known_pull)
        at = next(i for i, part in enumerate(output) if i != place and isinstance(part, Tensor) and part.requires_grad)
        carried = add_balance_gradient(output[at], logits, real, self._known_pull)
        return type(output)((*output[:at], carried, *output[at + 1 :]))

    def reopening(
        self, other: Callable[[], AbstractContextManager[None]] | None = None
    ) -> Callable[[], AbstractContextManager[None]]:
        """Opens later, when a block runs again, the batch that it runs on now; and inside it, `other`."""
        real = self._real

        @contextmanager
        def open_again() -> Iterator[None]:
            before, self._real = self._real, real
            try:
                with nullcontext() if other is None else other():
                    yield
            finally:
                self._real = before

        return open_again

    def _see_batch(self, _root: nn.Module, args: tuple[Any, ...]) -> None:
        self._real = args[1].real_tokens

    def _own(self, logits: Tensor) -> tuple[Tensor, bool]:
        """Which of the tokens of `logits` are real [N], and whether every tp rank has the same tokens here."""
        real, size = self._real, self._layout.size("tp")
        if len(logits) == real.numel():
            return real.reshape(-1), True
        if len(logits) * size == real.numel():
            length = real.shape[1] // size
            return real.narrow(1, self._layout.rank("tp") * length, length).reshape(-1), False
        raise RuntimeError(f"a router saw {len(logits)} tokens of a batch of {tuple(real.shape)}")

    def _known_pull(self) -> Tensor:
        if self._pull is None:
            raise RuntimeError("call settle() before the backward")
        return self._pull


class _RouterHook:
    def __init__(self, balance: Balance, place: int, partial: bool):
        self._balance, self._place, self._partial = balance, place, partial

    @torch.compiler.disable
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return self._balance.see(output, self._place, self._partial)
