"""Names of a checkpoint's tensors against names of the model's, both ways, as transformers' own conversions relate them.

With hf.py and initialize.py one of the files that call private transformers functions; tests/unit/test_models_contract.py
pins what they need.
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
            model._weight_conversions = self._follow()

    def _follow(self) -> list:
        """The conversions that reading the checkpoint uses; finds `unread` on the way."""
        conversions = get_model_conversion_mapping(self.model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        own = self.model.state_dict()
        for name in self.stored:
            prefix = self.model.base_model_prefix
            found, _ = rename_source_key(name, renamings, converters, prefix, own)
            if found not in own and name not in own:
                self.unread.add(name)
        return [c for c in conversions if c.was_used()]

    def written(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model in the checkpoint's names and form (experts apart again, say)."""
        return {self._with_stored_prefix(name): tensor for name, tensor in revert_weight_conversion(self.model, state).items()}

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
