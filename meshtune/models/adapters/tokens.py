"""Tokens whose rows of the embedding are trained, in PEFT's own layer: without its copy of the whole embedding at each call, and
right where the vocabulary is cut over ranks. Imports PEFT: import this module only where a model has an adapter."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.layout import Layout
from meshtune.layout.collectives import copy_to
from meshtune.layout.pieces import piece_of
from meshtune.models.adapters.decomposition import is_made_of_weights
from meshtune.models.adapters.variant import NAME, lora_layers


class TokenRows(TrainableTokensLayer):
    """The base's output, with that of the trained rows in the place of what they stand for."""

    layout: Layout | None = None
    _known: tuple[Tensor, Tensor] | None = None

    @classmethod
    def instead_of(cls, layer: TrainableTokensLayer) -> TokenRows:
        """The same tensors under the same names."""
        rows: TokenRows = object.__new__(cls)
        rows.__dict__.update(layer.__dict__)
        if NAME in rows.trainable_tokens_original:
            del rows.trainable_tokens_original[NAME]  # what taking rows out again would need
        return rows

    def forward_adapters(self, x: Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or not active_adapters:
            return cast(Tensor, self.base_layer(x, *args, **kwargs))
        result, rows = self.base_layer(x, *args, **kwargs), self.trainable_tokens_delta[NAME]
        return (
            self._looked_up(x, result, rows)
            if isinstance(self.base_layer, nn.Embedding)
            else self._as_logits(x, result, rows)
        )

    def _looked_up(self, ids: Tensor, result: Tensor, rows: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        tokens, order = self._sorted(ids.device)
        place = torch.searchsorted(tokens, ids).clamp_max_(len(tokens) - 1)
        found = tokens[place] == ids
        padding = self.base_layer.padding_idx
        still = self.token_indices[NAME].index(padding) if padding in self.token_indices[NAME] else None
        own = F.embedding(order[place], rows, padding_idx=still).to(result.dtype)
        scale = self._get_embed_scale()
        if scale is not None:
            own = own * scale.to(own.dtype)
        return torch.where(found[..., None], own, result)

    def _as_logits(self, hidden_states: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """[..., vocabulary, or this rank's part of it] of the head's input [..., hidden]."""
        piece = piece_of(self.base_layer, "weight")
        tokens, order = self._sorted(logits.device)
        if piece is not None:
            (start, length), *_ = piece.spans
            here = (tokens >= start) & (tokens < start + length)
            tokens, order = tokens[here] - start, order[here]
            assert self.layout is not None
            rows = copy_to(rows, self.layout.peers(piece.axis))  # each rank has the gradient of its columns
        bias = cast(Tensor | None, self.base_layer.bias)
        own = F.linear(hidden_states, rows[order].to(hidden_states.dtype), None if bias is None else bias[tokens])
        return logits.index_copy(-1, tokens, own.to(logits.dtype))

    def _sorted(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tokens in order, and which of the trained rows is whose."""
        if self._known is None or self._known[0].device != device:
            found = torch.tensor(self.token_indices[NAME], device=device).sort()
            self._known = found.values, found.indices
        return self._known


def check_rows(model: nn.Module, init: str) -> None:
    """Raises ModelError naming a layer of `model`, with an adapter that begins as `init` says, whose weight that would need and
    which has trained rows around it: a head that is tied to the embedding."""
    for path, layer in lora_layers(model):
        if not isinstance(layer.base_layer, TrainableTokensWrapper):
            continue
        dora = NAME in layer.lora_magnitude_vector
        if dora or is_made_of_weights(init):
            asked = "use_dora" if dora else f"init_lora_weights: {init}"
            raise ModelError(
                f"peft.{asked} does not go with {path}, which has the rows of peft.trainable_token_indices, too, since it is "
                "tied to the embedding; leave that layer out, or one of the two keys"
            )


def use_own_rows(model: nn.Module) -> None:
    """Put these layers in the place of PEFT's, before `model` is cut."""
    for module in list(model.modules()):
        if isinstance(module, TrainableTokensWrapper):
            module.token_adapter = TokenRows.instead_of(module.token_adapter)


def place_rows(model: nn.Module, layout: Layout) -> None:
    """Tell them over which ranks a vocabulary goes on."""
    for module in model.modules():
        if isinstance(module, TokenRows):
            module.layout = layout
