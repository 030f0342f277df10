"""Names of a checkpoint's tensors against names of the model's, both ways, as transformers' own conversions relate them.

tests/unit/test_models_contract.py pins what this needs of transformers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


class Renaming:
    """Which tensor of the model a stored tensor goes into, by given conversions of transformers, as loading finds it."""

    def __init__(self, model: PreTrainedModel, conversions: list):
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._own, self._prefix = model.state_dict(), model.base_model_prefix

    def __call__(self, name: str) -> tuple[str, WeightConverter | None]:
        """(the name, which the model may not have; the converter on the way there, if there is one)."""
        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._own)
        if found not in self._own and name in self._own:
            return name, None
        return found, None if pattern is None else self._by_pattern[pattern]


class CheckpointNames:
    """How `model` is written in the names of the checkpoint that it came from.

    `stored` are the names of the checkpoint's tensors; empty for a model that came from none, which is written as
    transformers writes a new model.
    """

    def __init__(self, model: PreTrainedModel, stored: Collection[str]):
        self.model, self.stored = model, set(stored)
        self.unread: set[str] = set()
        """Stored names from which no tensor of the model is filled."""
        model.__dict__.pop("_weight_conversions", None)
        if stored:
            model._weight_conversions = self._follow()  # type: ignore[assignment]

    def _follow(self) -> list:
        """The conversions that reading the checkpoint uses; finds `unread` on the way."""
        conversions = get_model_conversion_mapping(self.model)
        target, own = Renaming(self.model, conversions), self.model.state_dict()
        self.unread.update(name for name in self.stored if target(name)[0] not in own)
        return [c for c in conversions if c.was_used()]

    def written(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model in the checkpoint's names and form (experts apart again, say)."""
        return {
            self._with_stored_prefix(name): tensor
            for name, tensor in revert_weight_conversion(self.model, state).items()
        }

    def _with_stored_prefix(self, name: str) -> str:
        """Some checkpoints leave the trunk's name out, which reading does not record."""
        prefix = f"{self.model.base_model_prefix}."
        others = (name.removeprefix(prefix), f"{prefix}{name}")
        return name if name in self.stored else next((other for other in others if other in self.stored), name)

    def left_out(self) -> set[str]:
        """Tied tensors of the model that are not written: of each group the checkpoint's own choice is, else the original."""
        groups: dict[str, list[str]] = {}
        for target, origin in self.model.all_tied_weights_keys.items():
            groups.setdefault(origin, [origin]).append(target)
        out: set[str] = set()
        for origin, names in groups.items():
            kept = [name for name in names if self._is_stored(name)] or [origin]
            out.update(set(names) - set(kept))
        return out

    def _is_stored(self, name: str) -> bool:
        shape = self.model.get_parameter(name).shape
        return any(found in self.stored for found in self.written({name: torch.empty(shape, device="meta")}))
