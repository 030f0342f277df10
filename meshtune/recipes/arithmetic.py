"""How much arithmetic a token of a run needs, by what its model has and what of it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from meshtune.observe import training_flops_per_token
from meshtune.recipes import precision


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters that a token meets: in the blocks and in the head, and those of each that are frozen."""

    body: float
    head: int
    frozen_body: float = 0.0
    frozen_head: int = 0


def sizes(model: PreTrainedModel, trained: Callable[[str], bool] | None = None) -> Sizes:
    """Of a whole meta model; of experts the active share. `trained` says of each parameter whether it is; None: all are."""
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    embedding = {id(p) for p in model.get_input_embeddings().parameters()} - head
    active = active_share(model.config.get_text_config(decoder=True))
    body = frozen_body = 0.0
    head_size = frozen_head = 0
    for name, parameter in model.named_parameters():
        frozen = trained is not None and not trained(name)
        if id(parameter) in head:
            head_size += parameter.numel()
            frozen_head += parameter.numel() * frozen
        elif id(parameter) not in embedding:
            count = parameter.numel() * (active if ".experts." in name else 1.0)
            body += count
            frozen_body += count * frozen
    return Sizes(body, head_size, frozen_body, frozen_head)


def flops_per_token(model: PreTrainedModel, found: Sizes, mean_length: float, supervised_share: float) -> float:
    """Of forward and backward."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", 0)
    size = heads * (config.to_dict().get("head_dim") or config.hidden_size // max(heads, 1))
    layers = getattr(config, "num_hidden_layers", 0)
    return training_flops_per_token(
        int(found.body),
        layers,
        size,
        mean_length,
        found.head,
        supervised_share,
        int(found.frozen_body),
        found.frozen_head,
    )


def active_share(config: Any) -> float:
    """The part of a layer's experts that one token meets, by a text model's config."""
    experts = precision.experts_of(config) or 1
    return min(1.0, (getattr(config, "num_experts_per_tok", None) or experts) / experts)
