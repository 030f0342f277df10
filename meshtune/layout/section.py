"""`distributed:`, the mesh on which a recipe runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section

Strategy = Literal["fsdp2", "ddp", "megatron_fsdp"]
ContextMethod = Literal["allgather", "ring", "ulysses"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble"]
Style = Literal["colwise", "rowwise", "replicate"]


class DistributedSection(Section):
    """How ranks are laid out. The shard degree of data parallelism is what remains of the world size."""

    strategy: Strategy = Field(
        "fsdp2",
        description="`fsdp2` shards parameters, gradients and optimizer state over the data-parallel ranks; "
        "`ddp` keeps a full copy on each; `megatron_fsdp` shards like `fsdp2` by NVIDIA's package, on CUDA devices "
        "(experimental, data and context parallelism only).",
    )
    dp_replicate_size: int = Field(
        1,
        ge=1,
        description="Groups of ranks that hold a full (sharded) copy of the model each. "
        "Between 1 and the world size: HSDP. No effect with `ddp`, which replicates everywhere.",
    )
    tp_size: int = Field(
        1,
        ge=1,
        description="Tensor parallelism: ranks among which attention heads, feed-forward widths and vocabulary are cut.",
    )
    sequence_parallel: bool = Field(
        False, description="Between the cut layers of tensor parallelism, cut activations along the sequence."
    )
    cp_size: int = Field(1, ge=1, description="Context parallelism: ranks among which each sequence is cut.")
    cp_method: ContextMethod | None = Field(
        None,
        description="How attention sees the whole sequence: `allgather` gathers keys and values (default), `ring` passes them "
        "around, `ulysses` exchanges sequence for heads.",
    )
    pp_size: int = Field(1, ge=1, description="Pipeline parallelism: stages into which the layers are cut.")
    pp_schedule: PipelineSchedule | None = Field(
        None, description="Order in which stages work on micro-batches. Default: `1f1b`."
    )
    pp_microbatches: int | None = Field(
        None,
        ge=1,
        description="Micro-batches that go through the pipeline together. Default: all of an optimizer step.",
    )
    ep_size: int = Field(
        1, ge=1, description="Expert parallelism: ranks among which experts are shared out; divides dp_shard x cp x tp."
    )
    timeout_minutes: float | None = Field(
        None,
        gt=0,
        description="How long ranks wait in training for one that does not come before the run ends with an error that names it. "
        "Default: torch's own limits, 10 minutes on CUDA devices, 30 elsewhere. A rank that writes its part of a checkpoint, or "
        "rank 0 an export, may need so long.",
    )
    plan: dict[str, Style] | None = Field(
        None,
        description="Tensor-parallel styles of modules by name, with `*` for any one part of it; before what the model's config "
        "says. `replicate` keeps a module whole.",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.tp_size == 1 and self.sequence_parallel:
            yield "sequence_parallel", "has no effect without tensor parallelism (tp_size > 1); write false"
        if self.tp_size == 1 and self.plan is not None:
            yield "plan", "has no effect without tensor parallelism (tp_size > 1); remove it"
        if self.cp_size == 1 and self.cp_method is not None:
            yield "cp_method", "has no effect without context parallelism (cp_size > 1); remove it"
        for key in ("pp_schedule", "pp_microbatches"):
            if self.pp_size == 1 and getattr(self, key) is not None:
                yield key, "has no effect without pipeline parallelism (pp_size > 1); remove it"
        if self.strategy == "ddp" and self.dp_replicate_size != 1:
            yield (
                "dp_replicate_size",
                f"{self.dp_replicate_size} has no effect with `strategy: ddp`, which keeps a full copy on every rank; "
                "remove it, or use `strategy: fsdp2` for HSDP",
            )
        if self.strategy == "megatron_fsdp":
            for key in ("dp_replicate_size", "tp_size", "pp_size", "ep_size"):
                if (size := getattr(self, key)) > 1:
                    yield (
                        key,
                        f"{size} needs `strategy: fsdp2`: megatron_fsdp runs with data and context parallelism alone",
                    )
        if self.strategy == "ddp" and self.ep_size > 1:
            yield (
                "ep_size",
                f"{self.ep_size} needs `strategy: fsdp2`: with `ddp` every rank holds every expert; copies of expert groups are "
                "`dp_replicate_size`",
            )
