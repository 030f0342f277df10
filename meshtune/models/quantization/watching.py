"""Which layers' weights a model's own code reads beside calling the layer: tried on a twin, once, before any weight is read.

A quantised layer can be called; what takes its weight apart (a product absorbed into another, a cast to the weight's dtype) would
find packed integers.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtune.models.blocks import generic
from meshtune.models.shrink import Degrees
from meshtune.models.source import Source
from meshtune.models.twin import build_twin, miniature_config, row_of_tokens

_TOKENS = 8


def weights_read(source: Source) -> frozenset[str]:
    """Names of linear layers, their numbers written as `*`. Raises ModelError if no twin can be built."""
    return _weights_read(_Key(source))


class _Key:
    """A source known by what decides the twin."""

    def __init__(self, source: Source):
        self.source = source
        self._facts = (source.model_class, source.config.to_json_string(use_diff=False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)


@cache
def _weights_read(key: _Key) -> frozenset[str]:
    source = key.source
    twin = build_twin(source, miniature_config(source, Degrees()), "eager", torch.device("cpu"))
    found: set[str] = set()
    for name, module in twin.named_modules():
        if type(module) is nn.Linear:
            module.__dict__["_found"] = partial(found.add, generic(name))
            module.__class__ = _Watched
    with torch.no_grad():
        twin(input_ids=row_of_tokens(twin, _TOKENS)[None], use_cache=False)
    return frozenset(found)


class _Watched(nn.Linear):
    """Says when its weight is asked for by anything but its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, *(self._parameters[name] for name in ("weight", "bias")))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.__dict__["_found"]()
        return super().__getattr__(name)
