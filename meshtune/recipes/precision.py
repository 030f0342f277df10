"""What `training.precision` asks for: what it cannot go with, what it comes to on a device, which layers compute in float8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshtune.errors import Problem, RecipeError
from meshtune.training.float8 import Float8Section

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from meshtune.layout import Layout, Plan
    from meshtune.parallel.float8 import Float8
    from meshtune.recipes.recipe import Recipe

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, message) of what contradicts the precision of a recipe."""
    precision, strategy, fp8 = recipe.training.precision, recipe.distributed.strategy, recipe.training.fp8
    widens = recipe.peft is not None and strategy == "fsdp2"  # frozen weights, a block at a time
    if recipe.model.dtype == "bfloat16" and precision in ("fp32", "fp16") and not widens:
        yield (
            "training.precision",
            f"{precision} cannot be computed with weights held in bfloat16; use `model.dtype: auto` or float32",
        )
    if precision in ("fp16", "fp8") and strategy == "megatron_fsdp":
        yield "training.precision", f"{precision} does not go with strategy: megatron_fsdp; write `strategy: fsdp2`"
    if precision == "fp8" and recipe.quantization is not None:
        yield "training.precision", "fp8 multiplies float weights, and quantization holds them in few bits; write bf16"
    if fp8 is not None and fp8.all_gather and recipe.training.offload == "parameters":
        yield (
            "training.fp8.all_gather",
            "gathers from the device, and offload: parameters keeps weights on the CPU; leave one out",
        )
    if fp8 is not None and fp8.all_gather and strategy != "fsdp2":
        yield "training.fp8.all_gather", f"has no effect with strategy: {strategy}, which gathers no weights"


def check(recipe: Recipe, device_type: str) -> None:
    """Raises RecipeError where float8 cannot be computed on this machine."""
    if recipe.training.precision != "fp8":
        return
    import torch

    from meshtune.parallel.float8 import problems

    asked = _asked(recipe)
    found = problems(asked.backend, asked.recipe, asked.emulate, torch.device(device_type))
    if misfits := [Problem(key, message) for key, message in found]:
        raise RecipeError(misfits)


def choose_compute(asked: str, recipe: Recipe, device: torch.device) -> tuple[str, float | None]:
    """The compute precision, and the peak FLOP/s of one device in it, for the MFU; of fp8 that of bf16."""
    from meshtune.observe import choose_precision, compute_dtype, device_peak_flops, measure_matmul_flops

    if asked == "auto" and recipe.model.dtype == "bfloat16":
        asked = "bf16"
    if asked != "auto" and device.type == "cuda":
        return asked, device_peak_flops(device, compute_dtype(asked))
    choice, measured = choose_precision(device)
    asked = choice if asked == "auto" else asked
    dtype = compute_dtype(asked)
    stated = device_peak_flops(device, dtype)
    return asked, stated or measured.get(asked) or measure_matmul_flops(dtype, 0.2, device)


def notes(recipe: Recipe, precision: str, device: torch.device) -> list[str]:
    """What a user would want to know of it."""
    import torch

    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return ["WARNING     this device has no bf16 products of its own, and is slow at them; fp16 suits it"]
    if precision == "fp8" and float8(recipe, device).emulate:
        return ["WARNING     fp8 is emulated: its numbers, at less than the speed of fp32"]
    return []


def float8(recipe: Recipe, device: torch.device) -> Float8:
    """How products are computed in float8; in which layers is not chosen yet."""
    from meshtune.parallel.float8 import Float8, has_products

    asked = _asked(recipe)
    emulate = not has_products(device, asked.recipe) if asked.emulate is None else asked.emulate
    return Float8(asked.recipe, bool(asked.all_gather), asked.backend, emulate)


def facts(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What is stored of fp8 beside the precision: what its section says or, where it says nothing, comes to here."""
    if recipe.training.precision != "fp8":
        return {}
    made = float8(recipe, device)
    return {"fp8": {key: getattr(made, key) for key in ("backend", "recipe", "all_gather", "emulate")}}


def chosen(recipe: Recipe, device: torch.device, model: PreTrainedModel, plan: Plan, layout: Layout) -> Float8 | None:
    """The same with the layers of a meta model that is not yet cut, or None if the recipe does not ask for fp8.

    Raises ModelError if there is none.
    """
    if recipe.training.precision != "fp8":
        return None
    from meshtune.models.adapters.view import base_view
    from meshtune.parallel.float8 import choose

    bare = {id(module): path for path, module in base_view(model).named_modules()}
    paths = {path: bare[id(module)] for path, module in model.named_modules() if id(module) in bare}
    experts = experts_of(model.config.get_text_config(decoder=True))
    return choose(float8(recipe, device), model, plan, layout, _asked(recipe).exclude_modules, paths, experts)


def experts_of(config: Any) -> int | None:
    """How many experts a layer has, by a text model's config."""
    return next((n for name in _EXPERT_COUNTS if isinstance(n := getattr(config, name, None), int) and n), None)


def _asked(recipe: Recipe) -> Float8Section:
    return recipe.training.fp8 or Float8Section()
