"""One gradient norm (C50): on every rank the scalar of one process; the same for the clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from meshtune.errors import TrainingError
from meshtune.optim.grad_norm import clip_grad_norm_, grad_norm
from meshtune.optim.section import OptimizerSection
from tests.ranks import Ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def backward(model: nn.Module) -> None:
    model(torch.arange(8)).square().sum().backward()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_and_clipped(model: nn.Module, max_norm: float | None) -> tuple[float, list[Tensor]]:
    parameters = list(model.parameters())
    norm = grad_norm(parameters)
    clip_grad_norm_(parameters, max_norm, norm)
    return norm.item(), [full(p.grad) for p in parameters]


def one_process(max_norm: float | None) -> tuple[float, list[Tensor]]:
    """torch's own norm and clipping."""
    model = make_model()
    backward(model)
    limit = math.inf if max_norm is None else max_norm
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.item(), [p.grad for p in model.parameters()]


def shard_whole(model: nn.Module) -> None:
    fully_shard(model)


def shard_hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def shard_one_part_and_leave_the_rest_plain(model: nn.Module) -> None:
    fully_shard(model[1])


def shard_parts_over_different_meshes(model: nn.Module) -> None:
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def sharded(shard: Callable[[nn.Module], None], max_norm: float | None) -> tuple[float, list[Tensor]]:
    model = make_model()
    shard(model)
    backward(model)
    return norm_and_clipped(model, max_norm)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6, 0.0])
@pytest.mark.parametrize(
    ("world_size", "shard"),
    [
        (1, shard_whole),
        (2, shard_whole),
        (3, shard_whole),
        (4, shard_hybrid),
        (2, shard_one_part_and_leave_the_rest_plain),
        (4, shard_parts_over_different_meshes),
    ],
)
def test_every_sharding_gives_the_norm_and_clipped_gradients_of_one_process(
    ranks: Ranks, world_size: int, shard: Callable[[nn.Module], None], max_norm: float | None
) -> None:
    expected_norm, expected_gradients = one_process(max_norm)
    answers = ranks.call(world_size, sharded, shard, max_norm)
    assert len({norm for norm, _ in answers}) == 1
    for norm, gradients in answers:
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def parameter(mesh: DeviceMesh, gradient: Tensor, *placements: Shard | Replicate | Partial) -> nn.Parameter:
    result = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    result.grad = distribute_tensor(gradient, mesh, placements)
    return result


def norm_of_a_mixture() -> float:
    """Uneven shards (3, 3, 3, 1 rows), empty ones (2 rows on 4 ranks), both mesh dims, a plain tensor."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 2.0)
    parameters = [
        parameter(line, torch.full((10, 3), 1.0), Shard(0)),
        parameter(square, torch.full((5, 3), 2.0), Shard(0), Shard(1)),
        plain,
        parameter(square, torch.full((5, 3), 3.0), Shard(0), Replicate()),
        parameter(line, torch.full((2,), 4.0), Shard(0)),
        parameter(square, torch.full((3,), 5.0), Replicate(), Replicate()),
    ]
    return grad_norm(parameters).item()


def test_uneven_and_empty_shards_on_a_mixture_of_meshes(ranks: Ranks) -> None:
    expected = math.sqrt(30 * 1 + 15 * 4 + 3 * 4 + 15 * 9 + 2 * 16 + 3 * 25)
    answers = ranks.call(4, norm_of_a_mixture)
    assert set(answers) == {answers[0]} and answers[0] == pytest.approx(expected, rel=1e-6)


def norm_without_gradients_on(rank: int | None) -> list[float]:
    """One rank has no gradient at all of the sharded parameters, as of experts that saw no token."""
    line = init_device_mesh("cpu", (2,))
    parameters = [parameter(line, torch.arange(4.0), Shard(0)), parameter(line, torch.ones(3), Replicate())]
    if dist.get_rank() == rank or rank is None:
        parameters[0].grad = None
    norm = grad_norm(parameters)
    clip_grad_norm_(parameters, 1.0, norm)
    return [norm.item(), parameters[1].grad.to_local()[0].item()]


def test_a_rank_without_gradients_takes_part_and_counts_zero(ranks: Ranks) -> None:
    for rank, squares in ((0, 13 + 3), (1, 1 + 3), (None, 3)):
        norm = math.sqrt(squares)
        answers = ranks.call(2, norm_without_gradients_on, rank)
        assert answers[0] == answers[1] == pytest.approx([norm, 1 / norm], rel=1e-5)


def norm_with(value: float) -> float:
    line = init_device_mesh("cpu", (2,))
    return grad_norm([parameter(line, torch.tensor([1.0, 2.0, value]), Shard(0))]).item()


def test_inf_and_nan_on_one_rank_reach_every_rank(ranks: Ranks) -> None:
    assert ranks.call(2, norm_with, math.inf) == [math.inf, math.inf]
    assert ranks.call(2, norm_with, -math.inf) == [math.inf, math.inf]
    assert all(math.isnan(norm) for norm in ranks.call(2, norm_with, math.nan))


def norm_with_placements(of_parameter: str, of_gradient: str) -> None:
    line = init_device_mesh("cpu", (2,))
    placements = {"partial": Partial(), "replicate": Replicate()}
    result = nn.Parameter(DTensor.from_local(torch.ones(2), line, [placements[of_parameter]]))
    result.grad = DTensor.from_local(torch.ones(2), line, [placements[of_gradient]])
    grad_norm([result])


@pytest.mark.parametrize("of_parameter", ["partial", "replicate"])
def test_a_partial_sum_is_refused(ranks: Ranks, of_parameter: str) -> None:
    with pytest.raises(TrainingError, match="placements"):
        ranks.call(2, norm_with_placements, of_parameter, "partial")


def test_bf16_gradients_are_summed_in_float32() -> None:
    value = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    value.grad = torch.full_like(value, 0.5)
    norm = grad_norm([value])
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(0.5 * math.sqrt(100_000), rel=1e-6)
    clip_grad_norm_([value], 0.25 * math.sqrt(100_000), norm)
    assert value.grad.unique().tolist() == [0.25]


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(TrainingError, match="at least one parameter"):
        grad_norm([])


def weights_after_steps(section: OptimizerSection, shard: Callable[[nn.Module], None] | None) -> list[Tensor]:
    model = make_model()
    if shard is not None:
        shard(model)
    optimizer = section.build(model.named_modules(), 0.05)
    for _ in range(3):
        backward(model)
        clip_grad_norm_(model.parameters(), 1.0, grad_norm(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return [full(p).detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(weight_decay=0.1),
        OptimizerSection(name="sgd", weight_decay=0.1, momentum=0.9, nesterov=True),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.parametrize("shard", [shard_whole, shard_parts_over_different_meshes])
def test_optimizers_update_shards_and_mixtures_as_one_process_does(
    ranks: Ranks, shard: Callable[[nn.Module], None], section: OptimizerSection
) -> None:
    expected = weights_after_steps(section, None)
    for weights in ranks.call(4, weights_after_steps, section, shard):
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
