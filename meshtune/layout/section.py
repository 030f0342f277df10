"""`distributed:`, the mesh on which a recipe runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section


class DistributedSection(Section):
    """How ranks are laid out. The shard degree of data parallelism is what remains of the world size."""

    strategy: Literal["fsdp2", "ddp"] = Field(
        "fsdp2",
        description="`fsdp2` shards parameters, gradients and optimizer state over the data-parallel ranks; "
        "`ddp` keeps a full copy on each.",
    )
    dp_replicate_size: int = Field(
        1,
        ge=1,
        description="Groups of ranks that hold a full (sharded) copy of the model each. "
        "Between 1 and the world size: HSDP. No effect with `ddp`, which replicates everywhere.",
    )
    tp_size: int = Field(1, ge=1, description="Tensor-parallel degree. Only 1 in this version.")
    cp_size: int = Field(1, ge=1, description="Context-parallel degree. Only 1 in this version.")
    pp_size: int = Field(1, ge=1, description="Pipeline-parallel degree. Only 1 in this version.")
    ep_size: int = Field(1, ge=1, description="Expert-parallel degree. Only 1 in this version.")
    sequence_parallel: bool = Field(
        False, description="Shard activations over the sequence inside a tensor-parallel group."
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        for axis in ("tp", "cp", "pp", "ep"):
            size = getattr(self, f"{axis}_size")
            if size != 1:
                yield (
                    f"{axis}_size",
                    f"{size} is not supported yet; this version runs data parallelism only "
                    f"(`strategy: fsdp2`, `strategy: ddp`, `dp_replicate_size`), so write {axis}_size: 1",
                )
        if self.sequence_parallel:
            yield "sequence_parallel", "has no effect without tensor parallelism (tp_size > 1); write false"
        if self.strategy == "ddp" and self.dp_replicate_size != 1:
            yield (
                "dp_replicate_size",
                f"{self.dp_replicate_size} has no effect with `strategy: ddp`, which keeps a full copy on every rank; "
                "remove it, or use `strategy: fsdp2` for HSDP",
            )
