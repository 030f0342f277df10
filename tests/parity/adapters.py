"""Adapters on a layout, through the real path, beside PEFT's own model in one process: the same values, rows and optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from meshtune.layout.pieces import aliases, named_pieces, whole_shape
from meshtune.models.adapters.view import adapter_of
from meshtune.models.causal_lm import CausalLM
from meshtune.models.gathering import whole_tensors
from meshtune.models.placing import local_of, own_slice
from tests.parity.conversations import Row
from tests.parity.reference import Course, Hyperparameters, token_losses
from tests.parity.runs import digests, records, train_watched

RANK, ALPHA = 4, 8
SCALE = 0.1


@dataclass(frozen=True)
class Case:
    """An adapter in PEFT's words for `peft_config`, and in the recipe's."""

    architecture: str
    recipe: dict[str, Any]
    config: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


def seeded(name: str, shape: Sequence[int]) -> Tensor:
    """A value that follows from a parameter's name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return SCALE * torch.randn(tuple(shape), generator=generator)


@torch.no_grad()
def give_values(model: nn.Module) -> None:
    """Every tensor of an adapter, B too, gets its value; what is trained whole keeps that of the model, and what begins as a part
    of the weights its own."""
    pieces, others, adapter = named_pieces(model), aliases(model), adapter_of(model)
    assert adapter is not None
    if adapter.section.init_lora_weights is not None or adapter.section.adapter is not None:
        return
    for name, parameter in model.named_parameters():
        if name in adapter.trained and "lora_" in name and "magnitude" not in name:
            whole = seeded(others.get(name, name), whole_shape(parameter.shape, pieces.get(name)))
            local_of(parameter).copy_(own_slice(whole, parameter, pieces.get(name)))


def train_with_peft(
    folder: Path, config: dict[str, Any], windows: Sequence[Sequence[Row]], begun: Path | None = None
) -> Course:
    """`train_plainly` for PEFT's model; the weights are those of the adapter, by the names that they have in ours. As it begins,
    it is saved to `begun`."""
    from peft import LoraConfig, get_peft_model

    plain = Hyperparameters()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, **config})).train()
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_" in name and "magnitude" not in name and "init_lora_weights" not in config:
                parameter.copy_(seeded(name, parameter.shape))
    if begun is not None:
        model.save_pretrained(begun)
    groups = [
        {
            "params": [p for name, p in trained.items() if ("norm" in name and "lora_" not in name) == exempt],
            "weight_decay": decay,
        }
        for exempt, decay in ((False, plain.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=plain.learning_rate, eps=plain.eps)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, len(windows))
    course = Course()
    for rows in windows:
        losses = token_losses(model, rows)
        losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), plain.max_grad_norm)
        course.loss.append(losses.mean().item())
        course.grad_norm.append(norm.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    course.weights = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return course


def references(
    cases: Sequence[tuple[Path, dict[str, Any]]], windows: Sequence[Sequence[Row]], begun: Sequence[Path] = ()
) -> list[Course]:
    """On a rank: the course of each case, and its adapter as it begins in a folder of `begun`, if there are some."""
    folders = begun or [None] * len(cases)
    return [train_with_peft(*case, windows, to) for case, to in zip(cases, folders, strict=True)]


def train_adapter(recipe: dict[str, Any], cache: str) -> Course:
    """On a rank: what the recipe's run left, with whole weights on rank 0."""
    before: dict[str, str] = {}

    def started(root: CausalLM) -> None:
        give_values(root.model)
        before.update(frozen(root.model))

    root = train_watched(recipe, cache, started)
    assert before
    assert frozen(root.model) == before, "a frozen weight has moved"
    return left_by(recipe, root)


def frozen(model: nn.Module) -> dict[str, str]:
    """A digest of what this rank holds of each parameter that no gradient is for."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: digest for name, digest in digests(model).items() if name not in trained}


def left_by(recipe: dict[str, Any], root: CausalLM) -> Course:
    steps = records(recipe, "loss")
    found = Course(loss=[step["loss"] for step in steps], grad_norm=[step["grad_norm"] for step in steps])
    adapter = adapter_of(root.model)
    assert adapter is not None
    state = root.model.state_dict()
    for block in whole_tensors(root.model, set(state) - set(adapter.tensors)):
        found.weights.update(block)
    return found


def train_adapters(recipes: Sequence[dict[str, Any]], cache: str) -> list[Course | str]:
    """On a rank: one run after another; of one that was refused, the message."""
    return [train_adapter(recipe, cache) for recipe in recipes]


def differences(found: Course, wanted: Course) -> dict[str, float]:
    """Relative: the largest of losses and of norms, and of the trained tensor that is furthest off."""
    assert set(found.weights) == set(wanted.weights), set(found.weights) ^ set(wanted.weights)
    each = {name: float((found.weights[name] - w).norm() / w.norm()) for name, w in wanted.weights.items()}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found.loss, wanted.loss, strict=True)),
        "grad_norm": max(abs(a - b) / abs(b) for a, b in zip(found.grad_norm, wanted.grad_norm, strict=True)),
        "weights": max(each.values()),
    }
