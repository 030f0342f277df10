"""One layout trained on this rank, by the very parts that training has; and what it left beside one process's course."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshtune.data import store
from meshtune.data.dataset import TokenDataset
from meshtune.errors import DataError, MeshtuneError
from meshtune.layout.pieces import Piece, named_pieces
from meshtune.layout.world import connect
from meshtune.recipes import assembly
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import Setup
from meshtune.training.hooks import Hook
from meshtune.training.loop import fit
from meshtune.training.signals import SignalStop
from meshtune.training.state import TrainState
from meshtune.training.step import StepResult


@dataclass
class Course:
    """What one optimizer's steps were on this rank. `weights` (rank 0): how far each tensor of the export is from the
    reference, relative in norm, and how far its update; `parts`: a digest of each part of a parameter that this rank holds."""

    optimizer: str
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a layout on one rank: its courses, or what refused it before training."""

    courses: list[Course] = field(default_factory=list)
    refused: str | None = None
    attention: str = ""


def run(recipes: list[Recipe], rows: str, export: str, reference: str | None, start: str) -> Outcome:
    """Train by each recipe on this rank, which differ in their optimizers, each from the same weights.

    `export`, `reference` (of one process, if it has run) and `start` are folders of weights.
    """
    with ExitStack() as held:
        try:
            setup = Setup(recipes[0], connect("cpu"), held, rows=lambda _: (_load(rows), {}))
            setup.model, parallel = assembly.build_model(setup, None)
        except MeshtuneError as error:
            return Outcome(refused=str(error))
        outcome = Outcome(attention=setup.attention.description)
        begun = [tensor.detach().clone() for tensor in _tensors(setup.model)]
        for recipe in recipes:
            setup.recipe = recipe
            _restore(setup.model, begun)
            parts, state, _ = assembly.assemble(setup, parallel, SignalStop())
            parts.saver = None
            record = _Record(Course(recipe.optimizer.name))
            fit(parts, state, [record])
            setup.export(Path(export) / record.course.optimizer)
            record.course.parts = dict(digests(setup.model.model))
            if setup.world.is_first and reference is not None:
                folders = Path(export) / record.course.optimizer, Path(reference) / record.course.optimizer
                record.course.weights = distances(*folders, Path(start))
            outcome.courses.append(record.course)
    return outcome


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@torch.no_grad()
def _restore(model: nn.Module, values: list[Tensor]) -> None:
    for tensor, value in zip(_tensors(model), values, strict=True):
        tensor.copy_(value)


class _Record(Hook):
    def __init__(self, course: Course):
        self.course = course

    def on_step(self, state: TrainState, result: StepResult, learning_rate: float, epoch: float) -> None:
        self.course.loss.append(float(result.loss))
        self.course.grad_norm.append(float(result.grad_norm))
        self.course.supervised_tokens.append(result.supervised_tokens)


def _load(folder: str) -> TokenDataset:
    found = store.load(Path(folder))
    if found is None:
        raise DataError(f"{folder} holds no documents")
    return found


def digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each part of a parameter that this rank holds, named by parameter and place, and a hash of its bytes.

    A tied parameter goes by one name, wherever a pipeline keeps copies of it.
    """
    pieces, tied = named_pieces(model), dict(getattr(model, "all_tied_weights_keys", {}))
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel():
            content = local.detach().contiguous().numpy().tobytes()
            yield f"{tied.get(name, name)} {_place(parameter, pieces.get(name))}", hashlib.sha256(content).hexdigest()


def _place(parameter: Tensor, piece: Piece | None) -> Any:
    """Where in the whole tensor a rank's part lies."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if piece is None:
        return offset, shape
    return [(part.start, part.shape) for part in piece.rectangles(offset, shape)]


def distances(found: Path, wanted: Path, start: Path) -> dict[str, tuple[float, float]]:
    """Of each tensor: the norm of the difference between two exports, as a part of the norm of the tensor and of the norm of
    its update from `start`. A tensor that one of them lacks, or has in another shape, is infinitely far."""
    mine, reference, before = (_weights(folder) for folder in (found, wanted, start))
    apart = {}
    for name in sorted(mine.keys() | reference.keys()):
        if name not in mine or name not in reference or mine[name].shape != reference[name].shape:
            apart[name] = (float("inf"), float("inf"))
            continue
        difference = (mine[name].double() - reference[name].double()).norm().item()
        size = reference[name].double().norm().item()
        update = (reference[name].double() - before[name].double()).norm().item() if name in before else size
        # Below this a difference is rounding: eight units in the last place of the tensor's own size.
        floor = 8 * torch.finfo(torch.float32).eps * size
        apart[name] = (difference / max(size, 1e-12), max(difference - floor, 0.0) / max(update, 1e-12))
    return apart


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
