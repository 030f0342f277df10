"""`training.fp8`: how matrix products are computed in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section

_TORCHAO_ONLY = ("all_gather", "emulate")


class Float8Section(Section):
    """Products of linear layers in float8, scaled anew each time; all else is computed in bf16, and weights are held in
    `model.dtype`. Head, embeddings, routers, adapters, and layers whose sizes are no multiples of 16 are left out."""

    recipe: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise",
        description="One scale for a whole tensor (quicker), or one for each row (outliers spoil less).",
    )
    all_gather: bool | None = Field(
        None,
        description="With fsdp2, gather weights in float8 instead of bf16: half of what is sent. tensorwise only. Default false.",
    )
    exclude_modules: str | list[str] | None = Field(
        None,
        description="Linear layers to leave out beside those, or modules around them: ends of names, with wildcards, or one "
        "regular expression.",
    )
    backend: Literal["torchao", "transformer_engine"] = Field(
        "torchao",
        description="Whose layers: torchao's, or NVIDIA's Transformer Engine (CUDA; written but not yet run).",
    )
    emulate: bool | None = Field(
        None,
        description="Round to float8 and multiply in fp32, slowly. Default: where the device has no float8 products; false "
        "refuses to run there.",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.all_gather and self.recipe == "rowwise":
            yield "all_gather", "needs one scale for a whole weight; write `recipe: tensorwise`, or leave it out"
        if self.backend == "transformer_engine":
            for key in _TORCHAO_ONLY:
                if getattr(self, key) is not None:
                    yield key, "is torchao's; leave it out with backend: transformer_engine"
            if self.recipe == "rowwise":
                yield "recipe", "rowwise is torchao's; with backend: transformer_engine write tensorwise"
