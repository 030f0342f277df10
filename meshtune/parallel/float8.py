"""Products of linear layers in float8 (`training.precision: fp8`).

Which layers is chosen once on the whole model (`choose`); each rank then swaps those that it has for the library's own, before
anything is cut (`swap`). For weights to be gathered in float8, torchao's tensor has to stand where FSDP2 finds a weight
(`gather_in_float8`), and the scale of each weight, which is over all of its shards, is found once a step (`precomputed_scales`).
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshtune.config.patterns import Patterns, covers, misspelt
from meshtune.errors import ModelError
from meshtune.layout import Layout, Plan
from meshtune.layout.pieces import Cut

__all__ = ["Float8", "choose", "gather_in_float8", "has_products", "precomputed_scales", "problems", "swap"]

_MULTIPLE = 16  # of both sizes of a weight: what the hardware multiplies
_EXTRAS = {"torchao": ("torchao", "torchao"), "transformer_engine": ("transformer_engine", "transformer-engine")}


@dataclass(frozen=True)
class Float8:
    """How products are computed in float8, and in which layers: `names` are paths of linear layers in the whole model, and
    `left_out` says for each reason how many others there are."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    all_gather: bool = False
    backend: Literal["torchao", "transformer_engine"] = "torchao"
    emulate: bool = False
    names: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """The choice in a line."""
        how = f"{self.backend} {self.recipe}"
        if self.all_gather:
            how += ", weights gathered in float8"
        left = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{len(self.names)} linear layers by {how}" + (f"; left out: {left}" if left else "")


def has_products(device: torch.device, recipe: str) -> bool:
    """Whether a device multiplies matrices in float8: NVIDIA from Ada on (by rows from Hopper on), AMD from the MI300 on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(device) >= ((8, 9) if recipe == "tensorwise" else (9, 0))


def problems(backend: str, recipe: str, emulate: bool | None, device: torch.device) -> Iterator[tuple[str, str]]:
    """(key, message) of what keeps float8 from running here."""
    package, extra = _EXTRAS[backend]
    if importlib.util.find_spec(package) is None:
        yield "training.fp8.backend", f"{backend} needs an extra: pip install 'meshtune[{extra}]'"
    if device.type == "mps":
        yield "training.precision", "fp8 has no tensors on Apple's devices; write fp16 or fp32"
    elif backend == "transformer_engine" and (torch.version.hip or not has_products(device, recipe)):
        yield "training.fp8.backend", "transformer_engine needs an NVIDIA device from Ada on; write `backend: torchao`"
    elif emulate is False and not has_products(device, recipe):
        yield (
            "training.precision",
            f"fp8 by {recipe} scales has no hardware here ({device.type}); leave fp8.emulate out to emulate it, or write bf16",
        )


def choose(
    asked: Float8,
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    exclude: Patterns | None = None,
    bare: Mapping[str, str] | None = None,
    experts: int | None = None,
) -> Float8:
    """The layers of a whole model (on meta, before anything is cut) that compute in float8.

    Those are plain linear layers inside blocks whose sizes, on every rank of `tp`, are multiples of 16; no router (a layer with
    one output for each of `experts`) and no adapter. `exclude` names others to leave out, or modules around them; `bare` is the
    path of each module in the model without an adapter, whose own layers it lacks.

    Raises ModelError for a pattern that names no layer, or if none is left.
    """
    names = bare or {path: path for path, _ in model.named_modules()}
    inside = tuple(f"{unit}." for unit in plan.units)
    weighty = {
        path: module
        for path, module in model.named_modules()
        if path in names and path.startswith(inside) and any(p.ndim > 1 for p in module.parameters(recurse=False))
    }
    linears = [names[path] for path, module in model.named_modules() if isinstance(module, nn.Linear) and path in names]
    if exclude is not None and (wrong := list(misspelt(exclude, linears, "in a linear layer"))):
        raise ModelError("\n".join(f"training.fp8.exclude_modules: {message}" for message in wrong))
    reasons: dict[str, str | None] = {
        path: "excluded"
        if exclude is not None and covers(exclude, names[path])
        else _reason(path, module, plan, layout, experts)
        for path, module in weighty.items()
    }
    left_out = dict(Counter(reason for reason in reasons.values() if reason is not None))
    if None not in reasons.values():
        told = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise ModelError(f"training.precision: no layer is left to compute in fp8 ({told}); write bf16")
    return replace(
        asked, names=frozenset(path for path, reason in reasons.items() if reason is None), left_out=left_out
    )


def _reason(path: str, module: nn.Module, plan: Plan, layout: Layout, experts: int | None) -> str | None:
    """Why a module inside a block is left out, or None."""
    if type(module) is not nn.Linear:
        return f"of class {type(module).__name__}"
    if module.out_features == experts:
        return "routers"
    for rank in range(layout.size("tp")):
        if any(size % _MULTIPLE for size in _local_shape(module, plan.cuts.get(f"{path}.weight"), layout, rank)):
            return f"of sizes that are no multiples of {_MULTIPLE}"
    return None


def _local_shape(module: nn.Linear, cut: Cut | None, layout: Layout, rank: int) -> tuple[int, ...]:
    shape = tuple(module.weight.shape)
    return shape if cut is None else cut.piece(shape, layout.size(cut.axis), rank).local_shape


def swap(model: nn.Module, float8: Float8) -> None:
    """Let the layers `float8.names` that are on this rank compute in float8. Call it before anything is cut or hooked."""
    if float8.backend == "transformer_engine":
        from meshtune.parallel.transformer_engine import swap as swap_for_transformer_engine

        swap_for_transformer_engine(model, float8.names)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=float8.emulate,
        # The tokens of a batch, which the gradient of a weight sums over, are any number.
        pad_inner_dim=not float8.emulate,
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path in float8.names)
    for path, module in model.named_modules():
        if path in float8.names:
            module.register_forward_pre_hook(_as_autocast_has_it)


def _as_autocast_has_it(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """torchao asks for CUDA's autocast alone."""
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return (args[0].to(torch.get_autocast_dtype(kind)), *args[1:])


def gather_in_float8(model: nn.Module, float8: Float8, ranks: int) -> None:
    """Have FSDP2 gather the weights of those layers in float8 over `ranks`. Call it right before `fully_shard`, when tensors
    have been cut. A weight whose rows the ranks do not share out evenly is gathered as any other."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for path, module in model.named_modules():
        layer: Any = module
        if path in float8.names and layer.weight.shape[0] % ranks == 0:
            kind = layer.config.cast_config_weight.target_dtype
            weight = WeightWithDynamicFloat8CastTensor(layer.weight.detach(), layer.linear_mm_config, kind)
            layer.weight = nn.Parameter(weight, layer.weight.requires_grad)


@contextmanager
def precomputed_scales(root: nn.Module) -> Iterator[None]:
    """Inside, weights that are gathered in float8 have scales that were found in one reduction for all of them.

    Outside each gather finds its own: weights may change there, by an optimizer or by what is loaded.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(root)
    try:
        yield
    finally:
        for parameter in root.parameters():
            local: Tensor | None = getattr(parameter, "_local_tensor", None)
            if hasattr(local, "_precomputed_scale"):
                local._precomputed_scale = None  # type: ignore[union-attr]
