"""Weights held in bfloat16 (C46): they move as float32 ones do on the mean, and alike on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtune.config import from_mapping
from meshtune.errors import RecipeError
from meshtune.layout.pieces import Cut, Piece, Rectangle
from meshtune.optim.in_backward import InBackward
from meshtune.optim.kept import state_bytes
from meshtune.optim.rounding import Position, join, noise, round_by_chance, split
from meshtune.optim.slices import REST, Rounding, Sliced
from meshtune.recipes import rounding as chosen
from meshtune.recipes.recipe import Recipe

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def whole(parameter: Tensor) -> Position:
    nothing = (0,) * parameter.ndim
    return Position("w", tuple(parameter.shape), [Rectangle(nothing, nothing, tuple(parameter.shape))])


def stepped(make: Make, kind: str, parameter: nn.Parameter, gradients: list[Tensor], position: Position) -> Sliced:
    optimizer = Sliced(make([parameter]), Rounding(kind, 5, {parameter: position}))  # type: ignore[arg-type]
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.param_groups[0]["train_step"] = step
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize(
    ("make", "steps", "gradient", "wanted"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-3), 100, 1.0, 0.9),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0), 100, 1.0, 0.9),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-2), 1000, 0.0, 0.99005),
    ],
    ids=["sgd", "adamw", "decay"],
)
def test_small_updates_move_weights(kind: str, make: Make, steps: int, gradient: float, wanted: float) -> None:
    """C46: to the nearest, they stay where they are."""
    parameter = nn.Parameter(torch.ones(40, 50, dtype=torch.bfloat16))
    gradients = [torch.full((40, 50), gradient)] * steps
    if kind == "nearest":
        optimizer = make([parameter])
        for each in gradients:
            parameter.grad = each.bfloat16()
            optimizer.step()
        assert (parameter == 1.0).all()
        return
    stepped(make, kind, parameter, gradients, whole(parameter))
    assert parameter.dtype == torch.bfloat16
    weights = parameter.detach().float()
    if kind == "stochastic":
        deviation, mean = weights.std().item(), weights.mean().item()
        assert mean == pytest.approx(wanted, abs=4 * deviation / math.sqrt(2000))
    else:  # near the bfloat16 that is nearest to the float32 weight; AdamW's moments are rounded by chance
        nearest = torch.tensor(wanted).bfloat16().float()
        assert (weights - nearest).abs().max() <= (
            2**-8 if gradient and isinstance(make([parameter]), torch.optim.AdamW) else 0
        )


def test_kahan_has_the_weights_of_float32() -> None:
    """SGD keeps no moments, so that weight and compensation together are the float32 weight, to the last bit."""
    start = torch.randn(30, 7).bfloat16()
    gradients = [torch.randn(30, 7).bfloat16().float() for _ in range(5)]
    held, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = stepped(lambda p: torch.optim.SGD(p, lr=0.01), "kahan", held, gradients, whole(held))
    plain = torch.optim.SGD([exact], lr=0.01)
    for gradient in gradients:
        exact.grad = gradient
        plain.step()
    rest = optimizer.state[held][REST]
    assert rest.dtype == torch.int16
    assert torch.equal(join(held.detach(), rest), exact.detach())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_weight_without_dimensions(name: str) -> None:
    """Its moments look like the counter of steps."""
    held, exact = (nn.Parameter(torch.tensor(1.5, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    makes: dict[str, Make] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    }
    optimizer = stepped(makes[name], "kahan", held, [torch.tensor(1.0)] * 4, whole(held))
    plain = makes[name]([exact])
    for _ in range(4):
        exact.grad = torch.tensor(1.0)
        plain.step()
    assert held.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all(value.shape == () for value in optimizer.state[held].values())


def test_the_space_for_what_rounding_takes_away_is_foreseen() -> None:
    """Also where updates are made in the backward."""
    weight = nn.Parameter(torch.zeros(30, 7, dtype=torch.bfloat16))
    group = {"params": [weight], "names": ["w"]}
    sliced = Sliced(torch.optim.AdamW([group], lr=1.0), Rounding("kahan", 5, {weight: whole(weight)}))
    for optimizer in (sliced, InBackward(sliced)):
        assert state_bytes(optimizer, weight, (30, 7), 2) == 30 * 7 * 3 * 2


def parts(shape: tuple[int, ...]) -> Iterator[tuple[Callable[[Tensor], Tensor], Position]]:
    """Ways to lie on ranks: rows, stacked blocks of rows, columns, columns of a shard of rows."""
    rows, columns = shape[0], shape[-1]
    last = len(shape) - 1

    def part(piece: Piece, first: int, count: int) -> tuple[Callable[[Tensor], Tensor], Position]:
        box = ((first, *(0,) * last), (count, *piece.local_shape[1:]))
        return lambda tensor: piece.of(tensor)[first : first + count].contiguous(), Position(
            "w", shape, list(piece.rectangles(*box))
        )

    for rank in range(2):
        blocks = (rows // 3, rows - rows // 3)
        for cut in (Cut("tp", 0, (rows,)), Cut("tp", 0, blocks), Cut("tp", -1, (columns - 2, 2))):
            piece = cut.piece(shape, 2, rank)
            size = piece.local_shape[0]
            yield part(piece, 0, size)
            yield part(piece, size // 2, size - size // 2)


@pytest.mark.parametrize("shape", [(9, 6), (12, 5, 4), (8,)], ids=str)
@pytest.mark.parametrize("kind", ["stochastic", "kahan"])
def test_every_layout_rounds_alike(shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has, after several steps with equal gradients, the very bits that it has in the whole; moments too."""
    torch.manual_seed(0)
    start = torch.randn(shape).bfloat16()
    gradients = [torch.randn(shape) for _ in range(6)]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)

    full = nn.Parameter(start.clone())
    wanted = stepped(make, kind, full, gradients, whole(full)).state[full]
    monkeypatch.setattr("meshtune.optim.slices._CPU_SLICE", 30)
    for take, position in [*parts(shape), (Tensor.clone, whole(full))]:
        own = nn.Parameter(take(start))
        found = stepped(make, kind, own, [take(gradient) for gradient in gradients], position).state[own]
        assert torch.equal(own, take(full.detach()))
        assert found.keys() == wanted.keys() == {"step", "exp_avg", "exp_avg_sq", *([REST] if kind == "kahan" else [])}
        for key in found.keys() - {"step"}:
            assert torch.equal(found[key], take(wanted[key])), key


def test_rounding_by_chance() -> None:
    """What a bfloat16 holds stays, what is not finite too; else the neighbours, the nearer the likelier."""
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan])
    most = torch.full((7,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_by_chance(exact, most).view(torch.int16), exact.bfloat16().view(torch.int16))
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_by_chance(nan, most[:2]).isnan().all() and split(nan)[0].isnan().all()
    rows = torch.arange(200)
    values = torch.full((200, 200), -1.0 - 0.25 / 128)
    rounded = round_by_chance(values, noise("a", rows, rows)).float()
    assert set(rounded.unique().tolist()) == {-1.0, -1.0 - 1 / 128}
    assert (rounded != -1.0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_noise() -> None:
    """Pinned, as a resumed run must find the same; and without a pattern that a mean would see."""
    found = noise("42 7 model.embed_tokens.weight", torch.arange(3), torch.arange(2))
    assert found.tolist() == NOISE
    many = noise("1", torch.arange(300), torch.arange(300)).float() / 0x10000
    assert many.mean().item() == pytest.approx(0.5, abs=0.005)
    assert many.mean(0).std().item() == pytest.approx(1 / math.sqrt(12 * 300), rel=0.2)
    assert many.mean(1).std().item() == pytest.approx(1 / math.sqrt(12 * 300), rel=0.2)
    other = noise("2", torch.arange(300), torch.arange(300)).float() / 0x10000
    for pair in ((many, other), (many[1:], many[:-1]), (many[:, 1:], many[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([t.reshape(-1) for t in pair]))[0, 1]) < 0.015


NOISE = [[17717, 58197], [59077, 65438], [51427, 24604]]


def recipe(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "x"},
        "data": {"train_path": "x.jsonl"},
        "training": {"learning_rate": 1e-3},
    }
    return from_mapping(
        Recipe, {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}
    )


def test_the_default_is_said() -> None:
    held = {"dtype": "bfloat16"}
    assert chosen.rounding(recipe()) is None and chosen.notes(recipe()) == []
    assert chosen.notes(recipe(model=held)) == ["rounding    stochastic (the default for weights held in bfloat16)"]
    assert chosen.notes(recipe(model=held, optimizer={"rounding": "kahan"})) == ["rounding    kahan"]
    assert "WARNING" in chosen.notes(recipe(model=held, optimizer={"rounding": "nearest"}))[0]
    assert chosen.rounding(recipe(model=held, peft={})) is None
    assert chosen.rounding(recipe(peft={"dtype": "bfloat16"})) == "stochastic"


@pytest.mark.parametrize("sections", [{}, {"peft": {}, "model": {"dtype": "bfloat16"}}], ids=["float32", "adapter"])
def test_rounding_without_bfloat16_weights_is_a_problem(sections: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(RecipeError, match=r"optimizer.rounding: has no effect on weights held in float32"):
        recipe(**sections, optimizer={"rounding": "stochastic"})
