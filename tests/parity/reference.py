"""What every layout must equal: a plain transformers loop in float32, one process, one batch a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_constant_schedule, get_cosine_schedule_with_warmup

from meshtune.optim.composite import Composite
from tests.parity.conversations import Row


@dataclass(frozen=True)
class Hyperparameters:
    """What the recipe under test and the plain loop share."""

    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 0.5
    optimizer: str = "adamw"
    warmup_steps: int = 0
    # Far above rounding: AdamW divides by the size of a gradient, and would make an update of the noise of a zero.
    eps: float = 1e-5
    # Ends of names of modules that do not learn.
    frozen: tuple[str, ...] = ()
    # Ends of names of modules, with their part of the learning rate and a weight decay of their own.
    groups: tuple[tuple[str, float, float], ...] = ()


@dataclass
class Course:
    """Loss, gradient norm and learning rate of each optimizer step, and the weights after the last."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def without_validation(self) -> Course:
        """The same for a run that has no validation data."""
        return replace(self, validation_loss=[])


def train_plainly(
    folder: Path,
    windows: Sequence[Sequence[Row]],
    hyperparameters: Hyperparameters,
    validation: Sequence[Row] = (),
) -> Course:
    """One optimizer step for each window of rows: padded into one batch, mean over its supervised tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    for module in (
        m for end in hyperparameters.frozen for n, m in model.named_modules() if f".{n}".endswith(f".{end}")
    ):
        module.requires_grad_(False)
    optimizer = _optimizer(model, hyperparameters)
    if hyperparameters.optimizer == "schedule_free_adamw":
        schedule = get_constant_schedule(optimizer)
    else:
        schedule = get_cosine_schedule_with_warmup(optimizer, hyperparameters.warmup_steps, len(windows))
    course = Course()
    averages = optimizer if hasattr(optimizer, "eval") else None
    if validation:
        course.validation_loss.append(_mean_loss(model, validation))
    for rows in windows:
        losses = token_losses(model, rows)
        losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), hyperparameters.max_grad_norm)
        course.loss.append(losses.mean().item())
        course.grad_norm.append(norm.item())
        course.learning_rate.append(schedule.get_last_lr()[0])
        course.supervised_tokens.append(len(losses))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if averages is not None:
        averages.eval()
    if validation:
        course.validation_loss.append(_mean_loss(model, validation))
    course.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return course


def token_losses(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Cross entropy of each supervised token, from the model's own logits on the padded rows."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        length = len(row.ids)
        ids[index, :length] = torch.tensor(row.ids)
        mask[index, :length] = 1
        labels[index, :length] = torch.where(torch.tensor(row.supervised), ids[index, :length], -100)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    targets = labels[:, 1:]
    return F.cross_entropy(logits[:, :-1][targets != -100].float(), targets[targets != -100], reduction="none")


@torch.no_grad()
def _mean_loss(model: nn.Module, rows: Iterable[Row]) -> float:
    """Row by row, so that no batch can matter."""
    model.eval()
    losses = torch.cat([token_losses(model, [row]) for row in rows])
    model.train()
    return losses.mean().item()


def _optimizer(model: nn.Module, hyperparameters: Hyperparameters) -> torch.optim.Optimizer:
    """Decay on matrices; none on biases and normalisation weights, which have names of their own."""
    plain, decayed, apart = [], [], []
    named = {}
    for end, rate, decay in hyperparameters.groups:
        own = [
            p for n, m in model.named_modules() if f".{n}".endswith(f".{end}") for p in m.parameters() if p not in named
        ]
        named.update(dict.fromkeys(own))
        apart.append({"params": own, "lr": rate * hyperparameters.learning_rate, "weight_decay": decay})
    for name, parameter in model.named_parameters():
        if parameter in named:
            continue
        exempt = name.endswith("bias") or "norm" in name or ".ln_" in name
        (plain if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": hyperparameters.weight_decay},
        {"params": plain, "weight_decay": 0.0},
        *apart,
    ]
    return _LIBRARY[hyperparameters.optimizer](model, groups, hyperparameters)


def _muon(model: nn.Module, groups: list[dict[str, Any]], asked: Hyperparameters) -> torch.optim.Optimizer:
    """Muon on hidden matrices, AdamW on the rest, stepped as one."""
    decayed, plain = (group["params"] for group in groups[:2])
    outside = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    hidden = [p for p in decayed if p.ndim == 2 and p not in outside]
    muon = torch.optim.Muon(
        hidden, lr=asked.learning_rate, weight_decay=asked.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    rest = [{**groups[0], "params": [p for p in decayed if p in outside]}, {**groups[1], "params": plain}]
    return Composite([muon, torch.optim.AdamW(rest, lr=asked.learning_rate, eps=asked.eps)])


def _library(name: str, **constants: Any) -> Callable[..., torch.optim.Optimizer]:
    def make(_model: nn.Module, groups: list[dict[str, Any]], asked: Hyperparameters) -> torch.optim.Optimizer:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(groups, lr=asked.learning_rate, **constants)

    return make


_LIBRARY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda _, groups, asked: torch.optim.AdamW(groups, lr=asked.learning_rate, eps=asked.eps),
    "sgd": lambda _, groups, asked: torch.optim.SGD(groups, lr=asked.learning_rate, momentum=0.9),
    "adafactor": lambda _, groups, asked: torch.optim.Adafactor(groups, lr=asked.learning_rate),
    "muon": _muon,
    "lion": _library("Lion"),
    "schedule_free_adamw": _library("ScheduleFreeAdamW", eps=1e-5),
}
