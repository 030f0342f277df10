"""Linear cross entropy in chunks equals the plain one, and never holds the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtune.losses import default_chunk_size, linear_cross_entropy

ROWS, HIDDEN, VOCABULARY = 23, 8, 37
HEADS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "plain": lambda linear, h: linear(h),
    "scaled": lambda linear, h: linear(h) * 0.0625,
    "hidden-scaled": lambda linear, h: linear(h / 3.0),
    "soft-capped": lambda linear, h: 3.0 * torch.tanh(linear(h) / 3.0),
    "saves-its-output": lambda linear, h: torch.tanh(linear(h)),
}


def make(bias: bool = True, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    torch.manual_seed(5)
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    return hidden, targets, linear


def plain(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("chunk_size", [1, 7, ROWS, ROWS + 10, None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_value_and_gradients_equal_plain_cross_entropy(name: str, bias: bool, chunk_size: int | None) -> None:
    hidden, targets, linear = make(bias)
    leaves = [hidden, *linear.parameters()]

    def head(h: Tensor) -> Tensor:
        return HEADS[name](linear, h)

    loss = linear_cross_entropy(hidden, targets, head, list(linear.parameters()), chunk_size)
    expected = plain(hidden, targets, head)
    assert loss.dtype == torch.float32 and loss.ndim == 0
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    scale = 0.37 / 11
    for ours, theirs in zip(gradients(loss * scale, *leaves), gradients(expected * scale, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_two_micro_batches_weight_their_tokens() -> None:
    """C35: sums divided by the tokens of the whole batch equal one batch of both, gradients too."""
    hidden, targets, linear = make()
    parameters = list(linear.parameters())
    whole = linear_cross_entropy(hidden, targets, linear, parameters, 7) / ROWS
    parts = [
        linear_cross_entropy(hidden[s], targets[s], linear, parameters, 7) / ROWS for s in (slice(0, 2), slice(2, ROWS))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(sum(parts), *parameters), gradients(whole, *parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_no_supervised_row_gives_exact_zeros_and_a_connected_graph(chunk_size: int | None) -> None:
    """C22: no NaN, and every parameter takes part, as DDP and FSDP need."""
    hidden, targets, linear = make(rows=0)
    loss = linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), chunk_size)
    assert loss.item() == 0.0 and loss.requires_grad
    for leaf, gradient in zip(leaves := [hidden, *linear.parameters()], gradients(loss / 5, *leaves), strict=True):
        assert gradient.shape == leaf.shape and torch.count_nonzero(gradient) == 0


def test_no_supervised_row_of_real_hidden_states_reaches_the_layers_below() -> None:
    hidden, _, linear = make()
    below = nn.Linear(HIDDEN, HIDDEN)
    selected = below(hidden)[torch.zeros(ROWS, dtype=torch.bool)]
    linear_cross_entropy(selected, torch.zeros(0, dtype=torch.int64), linear, list(linear.parameters())).backward()
    assert torch.count_nonzero(below.weight.grad) == 0 and torch.count_nonzero(linear.weight.grad) == 0


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden", "all parameters"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_right(frozen: str) -> None:
    hidden, targets, linear = make()
    leaves = {"hidden": hidden, **dict(linear.named_parameters())}
    for name in ["weight", "bias"] if frozen == "all parameters" else [frozen]:
        leaves[name].requires_grad_(False)
    trainable = [leaf for leaf in leaves.values() if leaf.requires_grad]
    loss = linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), 7)
    expected = plain(hidden, targets, linear)
    for ours, theirs in zip(gradients(loss, *trainable), gradients(expected, *trainable), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert all(leaf.grad is None for leaf in leaves.values() if not leaf.requires_grad)


def test_a_tied_embedding_receives_both_gradients() -> None:
    _, targets, linear = make(bias=False)
    ids = (targets + 1) % VOCABULARY

    def loss(function: Callable[..., Tensor], *more: Any) -> Tensor:
        hidden = F.embedding(ids, linear.weight).tanh()
        return function(hidden, targets, linear, *more)

    (ours,) = gradients(loss(linear_cross_entropy, [linear.weight], 7), linear.weight)
    (theirs,) = gradients(loss(plain), linear.weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_bf16_gradients_are_summed_over_chunks_in_float32() -> None:
    """Chunks change a bf16 gradient by no more than its own rounding, however many they are."""
    hidden, targets, linear = make(rows=512, dtype=torch.bfloat16)
    leaves = [hidden, *linear.parameters()]

    def run(chunk_size: int) -> list[Tensor]:
        return gradients(linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), chunk_size), *leaves)

    exact = gradients(plain(hidden.double(), targets, linear.double()), *leaves[:1])
    hidden, targets, linear = make(rows=512, dtype=torch.bfloat16)
    leaves = [hidden, *linear.parameters()]
    one, many = run(512), run(2)
    assert all(g.dtype == torch.bfloat16 for g in many)
    torch.testing.assert_close(many[0].float(), exact[0].float(), rtol=2e-2, atol=2e-2)
    for few_chunks, many_chunks in zip(one, many, strict=True):
        torch.testing.assert_close(few_chunks, many_chunks, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_under_autocast(chunk_size: int | None) -> None:
    hidden, targets, linear = make()
    leaves = [hidden, *linear.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), chunk_size)
        expected = plain(hidden, targets, linear)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_without_gradients_only_the_value_is_computed() -> None:
    hidden, targets, linear = make()
    with torch.no_grad(), CreatedTensors() as created:
        loss = linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), 7)
    assert not loss.requires_grad
    assert max(created.sizes) <= 7 * VOCABULARY, "no gradient of the weight"
    torch.testing.assert_close(loss, plain(hidden, targets, linear).detach(), rtol=1e-5, atol=0)


class CreatedTensors(TorchDispatchMode):
    """Records how many elements every new tensor has, those of the backward included; a view is not new."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = (t for t in tree_leaves(result) if isinstance(t, Tensor))
        self.sizes.update(t.numel() for t in new if t.untyped_storage().data_ptr() not in old)
        return result


@pytest.mark.parametrize("name", ["plain", "soft-capped"])
def test_no_tensor_holds_the_logits_of_more_rows_than_a_chunk(name: str) -> None:
    hidden, targets, linear = make()
    with CreatedTensors() as created:
        loss = linear_cross_entropy(hidden, targets, lambda h: HEADS[name](linear, h), list(linear.parameters()), 6)
        (loss * 0.5).backward()
    weight = VOCABULARY * HIDDEN
    assert max(created.sizes - {weight}) <= 6 * VOCABULARY < ROWS * VOCABULARY
    with CreatedTensors() as created:
        plain(hidden, targets, linear).backward()
    assert ROWS * VOCABULARY in created.sizes, "the recorder sees what it should see"


def test_a_target_out_of_range_is_an_error() -> None:
    hidden, targets, linear = make()
    for wrong in (VOCABULARY, -100):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            linear_cross_entropy(hidden, targets.clone().fill_(wrong), linear, list(linear.parameters()))


def test_a_parameter_left_out_is_refused_because_it_would_not_train() -> None:
    hidden, targets, linear = make()
    with pytest.raises(ValueError, match=r"shape \[37\] that head_parameters lacks"):
        linear_cross_entropy(hidden, targets, linear, [linear.weight])


def test_a_second_backward_is_refused() -> None:
    hidden, targets, linear = make()
    loss = linear_cross_entropy(hidden, targets, linear, list(linear.parameters()))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


def test_wrong_shapes_and_chunk_sizes_are_refused() -> None:
    hidden, targets, linear = make()
    with pytest.raises(ValueError, match="want hidden_states"):
        linear_cross_entropy(hidden, targets[:-1], linear, list(linear.parameters()))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        linear_cross_entropy(hidden, targets, linear, list(linear.parameters()), 0)


def test_the_default_chunk_is_bounded_in_bytes_but_not_too_small() -> None:
    cpu = torch.device("cpu")
    assert default_chunk_size(49152, cpu) == 341
    assert default_chunk_size(262144, cpu) == 256
    assert default_chunk_size(32, cpu) == 64 * 2**20 // 128


@pytest.mark.parametrize("scale", [2.0**16, 655.36])
def test_an_expected_scale_changes_no_number_in_float32(scale: float) -> None:
    """The gradient is multiplied in the forward instead of the backward."""
    hidden, targets, linear = make()
    leaves, parameters = [hidden, *linear.parameters()], list(linear.parameters())
    wanted = gradients(linear_cross_entropy(hidden, targets, linear, parameters) * scale, *leaves)
    found = gradients(linear_cross_entropy(hidden, targets, linear, parameters, gradient_scale=scale) * scale, *leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


def test_small_gradients_do_not_vanish_in_float16() -> None:
    """Probabilities below float16's least number still push their rows of the head: with the scale, as in float32."""
    hidden, targets, linear = make(bias=False)
    with torch.no_grad():
        linear.weight *= 40  # far from every target but one
        targets = linear(hidden).argmax(-1)
    exact = gradients(linear_cross_entropy(hidden, targets, linear, [linear.weight]), linear.weight)[0]
    half, scale = linear.half(), 2.0**10
    halves = hidden.detach().half().requires_grad_()
    errors = {}
    for expected in (1.0, scale):
        loss = linear_cross_entropy(halves, targets, half, [half.weight], gradient_scale=expected) * scale
        found = gradients(loss, half.weight)[0].float() / scale
        lost = (exact.abs() > 1e-9) & (found == 0)
        errors[expected] = int(lost.sum())
    assert errors[scale] < errors[1.0] / 2
