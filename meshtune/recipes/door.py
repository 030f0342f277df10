"""The Python door: the machine that the command line runs, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from meshtune.config import from_mapping, load
from meshtune.errors import RecipeError
from meshtune.models.adapters.view import Adapter, adapter_of
from meshtune.models.gathering import whole_tensors
from meshtune.models.section import ModelSection
from meshtune.models.source import resolve
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import RunResult, run


def train(recipe: Recipe | Mapping[str, Any] | str | Path, *, device: str | None = None) -> RunResult:
    """Train by a recipe: a path to a YAML file, a mapping of its sections, or a `Recipe`.

    Joins the ranks of torchrun if this process is one. Raises MeshtuneError; training.Interrupted on a signal.
    """
    return run(_as_recipe(recipe), device)[0]


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    return from_mapping(Recipe, recipe) if isinstance(recipe, Mapping) else load(Recipe, str(recipe))


class AutoModelForCausalLM:
    """transformers' class of that name, whose models also train by a recipe."""

    @staticmethod
    def from_pretrained(name: str, *, device: str | None = None, **settings: Any) -> PreTrainedModel:
        """A transformers model on `device`, with every method it has there, and `train(recipe)`.

        `settings` are keys of the recipe's `model` section, such as `dtype` or `attention`.
        """
        section = from_mapping(ModelSection, {"name": name, **settings})
        source = resolve(section)
        attention: dict[str, Any] = {} if section.attention == "auto" else {"attn_implementation": section.attention}
        file: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        model_class: Any = source.model_class
        model: Any = _trainable(model_class).from_pretrained(
            source.location,
            config=source.config,
            dtype=source.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
            **attention,
            **file,
        )
        model._meshtune_section = section
        return model.to(device) if device is not None else model


class Trainable(PreTrainedModel):
    """What `AutoModelForCausalLM.from_pretrained` adds to a model's class."""

    _meshtune_section: ModelSection

    def train(self, mode: bool | Mapping[str, Any] | Recipe = True) -> Any:
        """With a bool or nothing: training mode, as in every `nn.Module`. With a mapping or a `Recipe`: train, from the
        weights that the model has now; it has the trained ones afterwards, or, by a recipe with `peft`, the adapter beside its
        own. Returns a RunResult."""
        if isinstance(mode, bool):
            return super().train(mode)
        recipe = self._recipe(mode)
        if getattr(self, "peft_config", None):
            raise RecipeError(
                "this model has an adapter already, and train(recipe) starts from a bare one; go on from the adapter's folder "
                "with peft.adapter and a model that was loaded anew, or merge it: meshtune export RUN --merge"
            )
        result, trained = run(recipe, self.device.type, weights=self.state_dict())
        adapter = adapter_of(trained.model)
        if adapter is None:
            _copy_weights(trained.model, self)
        else:
            _put_adapter(trained.model, adapter, self)
        return result

    def _recipe(self, given: Mapping[str, Any] | Recipe) -> Recipe:
        own = self._meshtune_section
        if isinstance(given, Recipe):
            if given.model.name != own.name:
                raise RecipeError(f"model.name: the recipe names {given.model.name}, but this model is {own.name}")
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"train takes a bool, a mapping of recipe sections or a Recipe, not {type(given).__name__}")
        stated = dict(given.get("model") or {})
        if stated.get("name", own.name) != own.name:
            raise RecipeError(f"model.name: the recipe names {stated['name']}, but this model is {own.name}")
        return from_mapping(Recipe, {**given, "model": {**own.model_dump(exclude_none=True), **stated}})


@cache
def _trainable(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`model_class` with `train(recipe)`, under its own name, by which checkpoints know it."""
    return type(model_class.__name__, (Trainable, model_class), {"__module__": model_class.__module__})


@torch.no_grad()
def _copy_weights(trained: PreTrainedModel, model: PreTrainedModel) -> None:
    """Every rank's `model` gets the whole of what the ranks have trained together."""
    own = model.state_dict()
    for block in whole_tensors(trained, left_out=set()):
        for name, tensor in block.items():
            own[name].copy_(tensor)
    for tensor in own.values():
        dist.broadcast(tensor, src=0)


def _put_adapter(trained: PreTrainedModel, adapter: Adapter, model: Any) -> None:
    """Every rank's `model` gets the adapter that the ranks have trained together, as transformers loads one."""
    from meshtune.models.adapters.writing import in_files, whole_adapter

    found = [in_files(whole_adapter(trained, adapter), adapter.config)]
    dist.broadcast_object_list(found, src=0)
    tensors, config = found[0]
    model.load_adapter(peft_config=config, adapter_state_dict=tensors, is_trainable=True)
