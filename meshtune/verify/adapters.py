"""The adapter of a user's recipe for the small model: for layers of the same kinds, in the same form, at a small rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshtune.config.patterns import matches
from meshtune.errors import RecipeError
from meshtune.models import hf
from meshtune.models.adapters.inject import inject
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.blocks import generic
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, resolve
from meshtune.recipes import adapting

if TYPE_CHECKING:
    from meshtune.recipes.recipe import Recipe

_RANK = 4


def made_small(recipe: Recipe, source: Source, folder: str) -> AdapterSection | None:
    """`peft:` for the small model in `folder`, from that of `recipe`, whose whole model is that of `source`; None without one.

    What is random, or rounds more than float32, is left out: no two layouts draw or round alike. Raises RecipeError if none of
    the layers is of a kind that the small model has.
    """
    chosen = adapting.choose(recipe, source)
    if chosen is None or recipe.peft is None:
        return None
    model = hf.build(source, "eager")
    adapter = inject(model, recipe.peft, chosen.config)
    layers, parameters, saved = [], [], []
    for path in adapter.inner:
        module: Any = model.get_submodule(path)
        if "modules_to_save" in module._modules:
            saved.append(path)
        elif hasattr(module, "parameter_name"):
            parameters += [f"{path}.{name}" for name in _stacked(module)]
        elif "token_adapter" not in module._modules:
            layers.append(path)
    small = hf.build(resolve(ModelSection(name=folder)), "eager")
    names, tensors = [path for path, _ in small.named_modules()], [name for name, _ in small.named_parameters()]
    targets = {"target_modules": _there(layers, names), "target_parameters": _there(parameters, tensors)}
    if not any(targets.values()):
        raise RecipeError("peft: has no layer of a kind that the model made small has; verify it without peft")
    config, tokens = chosen.config, _tokens(chosen.config.trainable_token_indices)
    changes = {
        **targets,
        "target_modules": targets["target_modules"] or [],  # nothing written would be every linear layer
        "r": min(config.r, _RANK),
        "alpha": float(config.lora_alpha) * min(config.r, _RANK) / config.r,
        "use_rslora": config.use_rslora or None,
        "use_dora": config.use_dora or None,
        "modules_to_save": _there(saved, names),
        "trainable_token_indices": list(range(min(tokens, int(small.config.get_text_config().vocab_size)))) or None,
        **dict.fromkeys(("adapter", "exclude_modules", "rank_pattern", "alpha_pattern", "dropout")),
        "dtype": "float32",
    }
    return recipe.peft.model_copy(update=changes)


def _tokens(named: list[int] | dict[str, list[int]] | None) -> int:
    """How many tokens PEFT's config names, which may do so for each module."""
    return max(map(len, named.values()), default=0) if isinstance(named, dict) else len(named or ())


def _stacked(wrapper: Any) -> Iterable[str]:
    """Names of the parameters that wrappers around one module are for."""
    while hasattr(wrapper, "parameter_name"):
        yield wrapper.parameter_name
        wrapper = wrapper.base_layer


def _there(paths: Iterable[str], names: Iterable[str]) -> list[str] | None:
    """Patterns of the kinds of `paths`, of which any of `names` is one."""
    known = list(names)
    kinds = dict.fromkeys(map(generic, paths))
    return [kind for kind in kinds if any(matches([kind], name) for name in known)] or None
