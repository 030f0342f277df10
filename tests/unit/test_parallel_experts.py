"""Experts on several ranks give the outputs and gradients of one, through whatever router sent the tokens (threads as ranks)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from meshtune.errors import LayoutError, ModelError
from meshtune.layout import AXES, Layout
from meshtune.layout.collectives import all_to_all, copy_to, reduce_from
from meshtune.layout.experts import Experts
from meshtune.layout.peers import Peers
from meshtune.layout.simulated import simulate
from meshtune.models.experts import experts_modules
from meshtune.models.source import causal_lm
from meshtune.parallel.experts import dispatch
from tests.unit.models_tiny import stirred, tiny_model

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
# Routers: softmax over all or over the chosen, sigmoid, with a bias, in groups.
# Blocks: with shared experts, with dense first layers, with experts in a latent space and without a gate.
FAMILIES = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "granitemoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 8},
    "nemotron_h": {"n_routed_experts": 4, "layers_block_type": ["moe", "attention"], "moe_latent_size": 16}
    | {"moe_shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
}
TINY = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")


def model_of(name: str) -> PreTrainedModel:
    if name in TINY:
        return tiny_model(name).train()
    config = AutoConfig.for_model(name, **{**SMALL, **FAMILIES[name]})
    for key in ("router_jitter_noise", "input_jitter_noise"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model_class, config = causal_lm(config)
    return stirred(model_class(config)).train()


def layout_of(ep: int, **degrees: int) -> Layout:
    return Layout({axis: degrees.get(axis, 1) for axis in AXES}, ep=ep)


def cut(module: nn.Module, experts: Experts, layout: Layout) -> None:
    """Leave this rank's experts, and dispatch."""
    share, rank = experts.share(layout.ep), layout.rank("ep")
    for name in experts.parameters:
        whole = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(whole[rank * share : (rank + 1) * share].clone()))
    dispatch(module, experts, layout)


def on_every_rank(
    layout: Layout, model: PreTrainedModel, loss: Callable[[nn.Module, Layout], Tensor]
) -> dict[str, Tensor]:
    """Losses added up under "loss", and the gradient of every parameter: summed over ranks, experts joined over `ep`."""

    def work(layout: Layout) -> tuple[Tensor, dict[str, Tensor | None]]:
        own = copy.deepcopy(model)
        for experts in experts_modules(own):
            cut(own.get_submodule(experts.path), experts, layout)
        value = loss(own, layout)
        value.backward()
        return value.detach(), {name: p.grad for name, p in own.named_parameters()}

    losses, gradients = zip(*simulate(layout, work), strict=True)
    parts = {f"{experts.path}.{name}" for experts in experts_modules(model) for name in experts.parameters}
    found = {"loss": torch.stack(losses).sum()}
    for name, parameter in model.named_parameters():
        present = [ranks[name] for ranks in gradients if ranks[name] is not None]
        assert len(present) in (0, len(gradients)), f"{name} has a gradient on some ranks only"
        if present and name in parts:
            copies = [torch.cat(present[start : start + layout.ep]) for start in range(0, len(present), layout.ep)]
            found[name] = torch.stack(copies).sum(0)
        elif present:
            found[name] = torch.stack(present).sum(0)
        assert not present or found[name].shape == parameter.shape
    return found


def on_one(model: PreTrainedModel, loss: Callable[[nn.Module, int], Tensor], ranks: int) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    total = torch.stack([loss(own, rank) for rank in range(ranks)]).sum()
    total.backward()
    return {"loss": total.detach(), **{name: p.grad for name, p in own.named_parameters() if p.grad is not None}}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + 1e-7, name


def next_tokens(model: nn.Module, row: Tensor) -> Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum")


ROWS = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [*TINY, *FAMILIES])
def test_four_ranks_with_different_tokens_are_as_one(name: str) -> None:
    model = model_of(name)
    assert experts_modules(model)
    wanted = on_one(model, lambda own, rank: next_tokens(own, ROWS[rank]), 4)
    found = on_every_rank(layout_of(4, dp_shard=4), model, lambda own, at: next_tokens(own, ROWS[at.rank("batch")]))
    assert_same(found, wanted)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("degrees", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}])
def test_every_implementation_of_experts_and_every_place_of_ep(implementation: str, degrees: dict[str, int]) -> None:
    """With two groups that each hold all experts, gradients of one expert are on two ranks."""
    model = model_of("mixtral")
    model.set_experts_implementation(implementation)
    layout = layout_of(2, **degrees)
    wanted = on_one(model, lambda own, rank: next_tokens(own, ROWS[rank]), 4)
    found = on_every_rank(layout, model, lambda own, at: next_tokens(own, ROWS[at.rank("loss")]))
    assert_same(found, wanted)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_ranks_whose_experts_get_no_token_keep_step(name: str, implementation: str) -> None:
    """Rows of two tokens, to the same two of four experts: forward, backward and gradients of zeros, not of None."""
    model = model_of(name)
    model.set_experts_implementation(implementation)
    row = torch.tensor([5, 5])
    wanted = on_one(model, lambda own, rank: next_tokens(own, row), 4)
    assert_same(on_every_rank(layout_of(4, dp_shard=4), model, lambda own, at: next_tokens(own, row)), wanted)


@pytest.mark.parametrize("tokens", [1, 7, 8])
@pytest.mark.parametrize(("degrees", "ep"), [({"tp": 4}, 4), ({"tp": 4}, 2), ({"dp_shard": 2, "tp": 2}, 4)])
def test_ranks_of_tp_share_the_tokens_that_they_all_have(tokens: int, degrees: dict[str, int], ep: int) -> None:
    """Outputs, and gradients of inputs, add up over `tp` to those of one rank."""
    model = model_of("mixtral").model.layers[0].mlp.experts
    (experts,) = experts_modules(model)
    generator = torch.Generator().manual_seed(1)
    batches = layout_of(ep, **degrees).size("batch")
    hidden = torch.randn(batches, tokens, 48, generator=generator)
    scores = torch.rand(batches, tokens, 4, generator=generator)
    probe = torch.randn(batches, tokens, 48, generator=generator)

    def run(module: nn.Module, batch: int) -> tuple[Tensor, ...]:
        inputs = hidden[batch].clone().requires_grad_(), scores[batch].clone().requires_grad_()
        weights, index = inputs[1].topk(2)
        output = module(inputs[0], index, top_k_weights=weights)
        (output * probe[batch]).sum().backward()
        return output.detach(), inputs[0].grad, inputs[1].grad

    def work(layout: Layout) -> tuple[int, tuple[Tensor, ...]]:
        own = copy.deepcopy(model)
        cut(own, experts, layout)
        return layout.rank("batch"), run(own, layout.rank("batch"))

    results = simulate(layout_of(ep, **degrees), work)
    for batch in range(batches):
        wanted = run(copy.deepcopy(model), batch)
        own = [values for at, values in results if at == batch]
        for found, value in zip(zip(*own, strict=True), wanted, strict=True):
            torch.testing.assert_close(torch.stack(found).sum(0), value, rtol=1e-5, atol=1e-6)


def test_experts_can_be_a_region_of_tp_by_themselves() -> None:
    """Hooks that sum over `tp`, put there before, see inputs before they leave and outputs after they have come back."""
    model = model_of("mixtral").model.layers[0].mlp.experts
    (experts,) = experts_modules(model)
    hidden, weights = torch.randn(7, 48), torch.rand(7, 2)
    index = torch.randint(4, (7, 2))

    def run(module: nn.Module) -> tuple[Tensor, Tensor]:
        own = hidden.clone().requires_grad_()
        output = module(own, index, weights)
        output.square().sum().backward()
        return output.detach(), own.grad

    def work(layout: Layout) -> tuple[Tensor, Tensor]:
        own, peers = copy.deepcopy(model), layout.peers("tp")
        own.register_forward_pre_hook(lambda _module, args: (copy_to(args[0], peers), *args[1:]))
        own.register_forward_hook(lambda _module, _args, output: reduce_from(output, peers))
        cut(own, experts, layout)
        return run(own)

    wanted = run(copy.deepcopy(model))
    for found in simulate(layout_of(2, tp=2), work):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_travels_once_to_a_rank_however_many_experts_it_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral").model.layers[0].mlp.experts
    (experts,) = experts_modules(model)
    index = torch.tensor([[0, 1], [0, 2], [3, 2]])  # to rank 0, to both, to rank 1
    travelled: list[int] = []

    def counted(tensor: Tensor, sent: list[int], received: list[int], peers: Peers) -> Tensor:
        if tensor.shape[1] == 48:
            travelled.append(len(tensor))
        return all_to_all(tensor, sent, received, peers)

    monkeypatch.setattr("meshtune.parallel.experts.all_to_all", counted)

    def work(layout: Layout) -> None:
        own = copy.deepcopy(model)
        cut(own, experts, layout)
        own(torch.randn(3, 48), index, torch.full((3, 2), 0.5))

    simulate(layout_of(2, dp_shard=2), work)
    assert travelled == [4] * 4  # there and back, on two ranks


def test_experts_that_do_not_divide_and_other_shapes_are_refused() -> None:
    model = model_of("mixtral").model.layers[0].mlp.experts
    (experts,) = experts_modules(model)
    with pytest.raises(LayoutError, match="4 experts"):
        dispatch(model, experts, layout_of(3, dp_shard=3))

    def work(layout: Layout) -> None:
        own = copy.deepcopy(model)
        cut(own, experts, layout)
        own(torch.randn(1, 3, 48), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2))

    with pytest.raises(ModelError, match="called with shapes"):
        simulate(layout_of(2, dp_shard=2), work)


def test_one_rank_is_left_alone() -> None:
    model = model_of("mixtral").model.layers[0].mlp.experts
    dispatch(model, experts_modules(model)[0], layout_of(1))
    assert not model._forward_hooks and not model._forward_pre_hooks
