"""What `quantization:` cannot go with in a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe


def problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """As those of a section: key and message."""
    if recipe.quantization is None:
        return
    if recipe.peft is None:
        yield "quantization", "quantised weights cannot be trained; add `peft:`, whose adapter is trained beside them"
        return
    start = recipe.peft.init_lora_weights or "default"
    if start not in ("default", "gaussian"):
        yield (
            "peft.init_lora_weights",
            f"{start} takes a part out of the weights, which quantised ones cannot give up exactly; write `default`",
        )
    if recipe.distributed.strategy == "megatron_fsdp":
        yield "distributed.strategy", "megatron_fsdp does not hold quantised weights; fsdp2 and ddp do"
