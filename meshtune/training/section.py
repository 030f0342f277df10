"""`training:`, how long and with what batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.errors import RecipeError
from meshtune.training.float8 import Float8Section
from meshtune.training.guard import Guard

_LARGEST_DERIVED_BATCH = 8


class TrainingSection(Section):
    """Length of the run, batch sizes, learning rate, precision."""

    epochs: float | None = Field(
        None, gt=0, description="Passes over the training rows. 1 if `max_steps` is absent too."
    )
    max_steps: int | None = Field(
        None, gt=0, description="Optimizer steps. With `epochs`, training ends at whichever comes first."
    )
    global_batch_size: int | None = Field(
        None, gt=0, description="Rows (or packs) in one optimizer step, over all ranks and micro-batches."
    )
    per_device_batch_size: int | None = Field(
        None,
        gt=0,
        description="Rows (or packs) in one micro-batch of one rank. Changes speed and memory, never the numbers.",
    )
    learning_rate: float = Field(ge=0, description="Peak learning rate.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Gradients are scaled down to this global L2 norm. null: no clipping."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="Compute precision; master weights, optimizer state and reductions follow `model.dtype`. "
        "`auto` measures once whether the device is quicker in bf16 than in fp32, and prints the choice. fp16 scales the loss; "
        "fp8 is bf16 with the products of linear layers in 8 bits.",
    )
    fp8: Float8Section | None = Field(
        None, description="How products are computed with `precision: fp8`. Default there: torchao, tensorwise."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="`full` keeps each block's input only; `selective` also the outputs of matrix products and attention.",
    )
    activation_checkpointing_every: int | None = Field(
        None, ge=1, description="Checkpoint one block in so many. Default 1: all of them."
    )
    activation_checkpointing_keep: list[Literal["matmul", "attention"]] | None = Field(
        None, min_length=1, description="selective only: operations whose outputs are kept. Default: both."
    )
    activation_offload: bool = Field(
        False,
        description="What the backward needs of the forward waits in the CPU's memory (what `selective` keeps excepted). On an "
        "accelerator.",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What waits in the CPU's memory. `optimizer`: moments, fetched a slice at a time; `parameters`: shards of "
        "weights, gradients and moments, which the CPU then updates (strategy fsdp2). On an accelerator.",
    )
    compile: bool = Field(False, description="torch.compile each block; refused where the compiler does not run.")
    eval_every_steps: int | None = Field(
        None,
        gt=0,
        description="Validate every so many steps, beside once before the first step and once after the last.",
    )
    eval_every_epochs: float | None = Field(
        None,
        gt=0,
        description="Validate each time so many epochs are over; 0.5 is twice an epoch. Also beside `eval_every_steps`.",
    )

    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient norm that is not finite: `stop` the run; `skip` the step, which leaves weights and "
        "optimizer as they were; `rollback` to the newest checkpoint and skip the step on the way again. The rows are named.",
    )
    on_loss_spike: Literal["ignore", "stop", "skip", "rollback"] = Field(
        "ignore", description="Likewise for a loss far above the losses before it."
    )
    spike_window: int | None = Field(
        None, ge=8, description="So many losses before are looked at (default: 100), once a quarter of them are there."
    )
    spike_threshold: float | None = Field(
        None,
        gt=0,
        description="A spike is so many robust standard deviations (1.4826 x median absolute deviation, at least 1 % of the "
        "median) above their median (default: 6).",
    )
    max_bad_steps: int | None = Field(
        None, ge=0, description="More bad steps than this within 100 stop the run all the same (default: 10)."
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        small, large = self.per_device_batch_size, self.global_batch_size
        if small is not None and large is not None and large % small:
            multiples = sorted({max(large // small, 1) * small, (large // small + 1) * small})
            yield (
                "global_batch_size",
                f"{large} is not a multiple of per_device_batch_size {small}; write {' or '.join(map(str, multiples))}",
            )
        if self.fp8 is not None and self.precision != "fp8":
            yield "fp8", f"has no effect with precision: {self.precision}; write `precision: fp8`, or leave it out"
        if self.activation_checkpointing == "none" and self.activation_checkpointing_every is not None:
            yield "activation_checkpointing_every", "has no effect with `activation_checkpointing: none`"
        if self.activation_checkpointing != "selective" and self.activation_checkpointing_keep is not None:
            yield (
                "activation_checkpointing_keep",
                f"has no effect with `activation_checkpointing: {self.activation_checkpointing}`; write `selective`",
            )
        if self.on_loss_spike == "ignore":
            for key in ("spike_window", "spike_threshold"):
                if getattr(self, key) is not None:
                    yield key, "has no effect with `on_loss_spike: ignore`"
        if self.max_bad_steps is not None and not self.forgives:
            yield "max_bad_steps", "has no effect where no bad step is skipped or rolled back"

    @property
    def forgives(self) -> bool:
        """Whether a bad step may be survived."""
        return not {self.on_nonfinite, self.on_loss_spike} <= {"ignore", "stop"}

    @property
    def rolls_back(self) -> bool:
        return "rollback" in (self.on_nonfinite, self.on_loss_spike)

    def guard(self) -> Guard:
        """The judge of each step."""
        given = {
            "window": self.spike_window,
            "threshold": self.spike_threshold,
            "max_bad_steps": self.max_bad_steps,
        }
        on_loss_spike = "accept" if self.on_loss_spike == "ignore" else self.on_loss_spike
        return Guard(
            self.on_nonfinite,
            on_loss_spike,
            **{k: v for k, v in given.items() if v is not None},  # type: ignore[arg-type]
        )

    def batch_sizes(self, ranks: int, together: int = 1) -> BatchSizes:
        """Both sizes for `ranks` data-parallel ranks, and, where the recipe leaves it open, `together` micro-batches or a
        multiple in each optimizer step. Raises RecipeError if they contradict each other."""
        small, large = self.per_device_batch_size, self.global_batch_size
        if large is None:
            small = small or 1
            return BatchSizes(small * ranks * together, small, together)
        unit = (small or 1) * ranks
        if large % unit:
            each = (
                f"per_device_batch_size {small} x {ranks} data-parallel ranks"
                if small
                else f"{ranks} data-parallel ranks"
            )
            below = large // unit * unit
            nearest = f"{below} or {below + unit}" if below else str(unit)
            raise RecipeError(
                f"training.global_batch_size: {large} cannot be shared out over {each}; write {nearest}, or change the ranks"
            )
        share = large // ranks
        fitting = [n for n in range(1, min(share, _LARGEST_DERIVED_BATCH) + 1) if share % n == 0]
        small = small or max((n for n in fitting if share // n % together == 0), default=fitting[0])
        return BatchSizes(large, small, share // small)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None or not limits:
            limits.append(max(1, math.ceil((self.epochs or 1.0) * batches_per_epoch - 1e-9)))
        return min(limits)


@dataclass(frozen=True)
class BatchSizes:
    """global_batch_size = per_device x data-parallel ranks x accumulation."""

    global_batch_size: int
    per_device_batch_size: int
    accumulation: int

    def summary(self) -> str:
        ranks = self.global_batch_size // self.per_device_batch_size // self.accumulation
        return (
            f"global batch {self.global_batch_size} = {self.per_device_batch_size} per device "
            f"x {ranks} rank{'s' * (ranks > 1)} x {self.accumulation} accumulation"
        )
