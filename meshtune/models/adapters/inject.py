"""Put an adapter into a model on meta, by PEFT's own functions. Nothing has a value yet, neither the model nor the adapter."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.errors import ModelError
from meshtune.models.adapters.section import ALPHA, AdapterSection, R
from meshtune.models.adapters.targets import Targets, shortest
from meshtune.models.adapters.view import Adapter, remember

if TYPE_CHECKING:
    from peft import LoraConfig

_WITHOUT = "peft: needs an extra: pip install 'meshtune[peft]' ({})"


def require_peft() -> None:
    """Raises ModelError if PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ModelError(_WITHOUT.format(error)) from error


def config_of(
    section: AdapterSection, targets: Targets, model: PreTrainedModel, tokens: Sequence[int] | None = None
) -> LoraConfig:
    """PEFT's config of an adapter of the bare `model`; `tokens` are ids of those that are trained."""
    from peft import LoraConfig

    alpha = ALPHA if section.alpha is None else section.alpha
    names = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    transposed = [isinstance(model.get_submodule(path), Conv1D) for path in targets.modules]
    begin = section.init_lora_weights or "default"
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r or R,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout or 0.0,
        target_modules=shortest(targets.modules, names),
        target_parameters=list(targets.parameters) or None,
        modules_to_save=list(targets.saved) or None,
        rank_pattern=dict(section.rank_pattern or {}),
        alpha_pattern=dict(section.alpha_pattern or {}),
        use_rslora=bool(section.use_rslora),
        use_dora=bool(section.use_dora),
        init_lora_weights=True if begin == "default" else begin,  # type: ignore[arg-type]
        trainable_token_indices=list(tokens) if tokens else None,
        fan_in_fan_out=bool(transposed) and all(transposed),
    )


def inject(model: PreTrainedModel, section: AdapterSection, config: LoraConfig) -> Adapter:
    """Wrap what `config` names in the bare meta `model`, in place, and say what was done.

    Parameters of the adapter are on meta in `peft.dtype`, and everything requires gradients as before: what is frozen is frozen
    when the weights are there. Raises ModelError for what PEFT cannot wrap.
    """
    from peft import inject_adapter_in_model

    from meshtune.models.adapters.decomposition import check_beginning
    from meshtune.models.adapters.layers import use_own_layers
    from meshtune.models.adapters.tokens import check_rows

    asked = copy.deepcopy(config)
    asked.init_lora_weights = True  # values come later; those that are made of weights, PEFT would want now
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each thing that PEFT warns of was checked before
            inject_adapter_in_model(asked, model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"peft: {type(model).__name__} cannot have this adapter: {error}") from error
    check_rows(model, str(config.init_lora_weights))
    check_beginning(model, str(config.init_lora_weights))
    use_own_layers(model)
    inner = dict(_inner_paths(model))
    trained = frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    _hold_in(model, trained, getattr(torch, section.dtype))
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    tensors = tuple(name for name, _ in model.named_parameters() if name in trained)
    adapter = Adapter(section, config, inner, trained, tensors, frozenset(_beginnings(config, tensors)))
    remember(model, adapter)
    return adapter


def _beginnings(config: LoraConfig, tensors: Iterable[str]) -> Iterator[str]:
    """Names of the buffers in which matrices that are made of weights keep how they began."""
    from meshtune.models.adapters.decomposition import BEGINNING, is_made_of_weights

    if is_made_of_weights(str(config.init_lora_weights)):
        yield from (f"{name.rpartition('.')[0]}.{BEGINNING}" for name in tensors if re.search(r"\.lora_[AB]\.", name))


def _inner_paths(model: nn.Module) -> list[tuple[str, str]]:
    """Path of each outermost wrapper of PEFT's, and of the module of the model inside."""
    found: list[tuple[str, str]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if is_wrapper(module) and not (found and path.startswith(f"{found[-1][0]}.")):
            found.append((path, _inside(path, module)))
    return found


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether a module is PEFT's, around one of the model's."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _inside(path: str, module: nn.Module) -> str:
    while is_wrapper(module):
        name = next(
            name for name in ("base_layer", "original_module", "token_adapter") if module._modules.get(name) is not None
        )
        path, module = f"{path}.{name}", module.get_submodule(name)
    return path


def _hold_in(model: nn.Module, names: frozenset[str], dtype: torch.dtype) -> None:
    """Let the named meta parameters be of `dtype`; tied ones stay tied."""
    changed: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, p in module._parameters.items():
            if p is not None and f"{path}.{leaf}" in names and p.dtype != dtype:
                module._parameters[leaf] = changed.setdefault(id(p), nn.Parameter(p.data.to(dtype)))
