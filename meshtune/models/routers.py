"""The load-balancing loss of an architecture: what transformers declares about its routers, tried before it is believed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtune.errors import ModelError
from meshtune.layout.experts import Balancing
from meshtune.losses.load_balancing import load, load_balancing_loss

_TOLERANCE = 1e-4
_ROUNDING = 1e-5


def balancing(model: PreTrainedModel) -> Balancing | None:
    """What `model` is to add for balance, or None if its config does not ask for it (`output_router_logits`) or weighs it with 0.

    Raises ModelError if it is not declared where transformers' models declare it.
    """
    config = model.config.get_text_config(decoder=True)
    if not getattr(config, "output_router_logits", False):
        return None
    coefficient = _declared(model, "router_aux_loss_coef", "aux_loss_coef")
    if coefficient == 0:
        return None
    experts = _declared(model, "num_experts", "num_local_experts")
    top_k = _declared(model, "num_experts_per_tok")
    routers = _routers(model)
    if not routers:
        raise _no_loss(model, "declares no router whose logits it records")
    return Balancing(routers, int(experts), int(top_k), float(coefficient))


@torch.no_grad()
def disproof(model: PreTrainedModel, row: Tensor) -> str | None:
    """None if the loss that `model`, a twin, returns for [T] token ids is its own without balance plus ours; else why not."""
    declared = balancing(model)
    if declared is None:
        return None
    was_training = model.training
    model.eval()
    row = row[None].to(next(model.parameters()).device)
    logits = _Recorded(model, declared)
    with_balance: Any = model(input_ids=row, labels=row, use_cache=False, output_router_logits=True)
    total = sum(load(each, torch.ones_like(each[:, 0], dtype=torch.bool), declared.top_k) for each in logits.take())
    without: Any = model(input_ids=row, labels=row, use_cache=False, output_router_logits=False)
    model.train(was_training)
    wanted = getattr(with_balance, "aux_loss", None)
    if wanted is None:
        return "its forward computes none"
    assert isinstance(total, Tensor)
    ours = load_balancing_loss(total).to(wanted)
    if total.numel() != 2 * declared.experts + 1 or (ours - wanted).abs() > _TOLERANCE * wanted.abs():
        return f"its forward gives {float(wanted):.6g}, and its router logits {float(ours):.6g}"
    added = with_balance.loss - without.loss
    if (added - declared.coefficient * wanted).abs() > _ROUNDING * without.loss.abs():
        return f"its forward adds {float(added):.3g} to the loss, not {declared.coefficient} of {float(wanted):.3g}"
    return None


class _Recorded:
    """The logits of every router, in the order in which they run, until they are taken."""

    def __init__(self, model: nn.Module, declared: Balancing):
        self._logits: list[Tensor] = []
        self._hooks = [
            model.get_submodule(path).register_forward_hook(
                lambda _m, _a, out, at=at: self._logits.append(_at(out, at))
            )
            for path, at in declared.routers.items()
        ]

    def take(self) -> list[Tensor]:
        for hook in self._hooks:
            hook.remove()
        return self._logits


def _at(output: Any, place: int) -> Tensor:
    return output if isinstance(output, Tensor) else output[place]


def _routers(model: PreTrainedModel) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix, part in model.named_modules():
        declared = getattr(type(part), "_can_record_outputs", None) or {}
        recorders = declared.get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target: Any = getattr(recorder, "target_class", recorder)
            for path, module in part.named_modules(prefix=prefix):
                wanted = getattr(recorder, "layer_name", None)
                if isinstance(module, target) and (wanted is None or wanted in path):
                    found[path] = getattr(recorder, "index", 0)
    return {path: found[path] for path, _ in model.named_modules() if path in found}


def _declared(model: PreTrainedModel, *names: str) -> float:
    """A number that the model or its config has under one of these names."""
    for place in (model, model.config.get_text_config(decoder=True)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    raise _no_loss(model, f"has no {names[0]}")


def _no_loss(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"model.name: the config sets output_router_logits, for which a loss of the routers' balance is trained on, but "
        f"{type(model).__name__} {reason}; set it to false in the model's config.json"
    )
