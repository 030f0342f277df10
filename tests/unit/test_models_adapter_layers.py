"""Adapters' own forward passes and first values beside PEFT's, whose names of tensors and whose numbers they have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from meshtune.errors import ModelError
from meshtune.layout import Plan
from meshtune.layout.experts import Experts
from meshtune.layout.pieces import Cut
from meshtune.layout.plan import Split
from meshtune.models.adapters.copies import with_copies
from meshtune.models.adapters.decomposition import check_beginning, take_from_weights
from meshtune.models.adapters.dropout import drop
from meshtune.models.adapters.layers import use_own_layers
from meshtune.models.adapters.section import AdapterSection
from meshtune.models.adapters.stacked import Updated
from meshtune.models.adapters.values import initialize_adapter
from meshtune.models.adapters.variant import LoraForward
from meshtune.models.adapters.view import Adapter, remember
from tests.unit.models_tiny import tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 7, 29, 7, 0, 11, 5], [1, 2, 3, 4, 5, 6, 7]])


class Layers(nn.Module):
    """One of each kind of layer that has an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 16, padding_idx=3)
        self.up = nn.Linear(16, 24)
        self.across = Conv1D(12, 24)
        self.down = nn.Linear(12, 16, bias=False)
        nn.init.normal_(self.across.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.embedding(ids)))
        return self.down(torch.tanh(self.across(hidden)))


ALL = ["embedding", "up", "across", "down"]


def adapted(model: nn.Module, **settings: Any) -> nn.Module:
    """`model` as PEFT wraps it."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ALL, **settings})
    return inject_adapter_in_model(config, model).train()


def stir(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            elif "lora_" in name or "delta" in name:
                parameter.normal_(0, 0.2)


def gradients(model: nn.Module, call: Any) -> dict[str, Tensor]:
    """The output under the name "", and the gradient of everything that is trained."""
    torch.manual_seed(5)
    output = call(model)
    output.float().square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {"": output.detach(), **found}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).abs().max() / w.abs().max().clamp_min(1e-9)) for n, w in wanted.items())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_forwards_are_peft_s_in_every_kind_of_layer(dora: bool, dropout: float) -> None:
    """Also the contract with `lora_variant`, which PEFT calls its own: these forwards are the ones that run."""
    theirs = adapted(Layers(), use_dora=dora, lora_dropout=dropout)
    stir(theirs)
    ours = copy.deepcopy(theirs)
    use_own_layers(ours)
    with patch.object(LoraForward, "forward", autospec=True, side_effect=LoraForward.forward) as called:
        found = gradients(ours, lambda model: model(IDS))
    assert called.call_count == (0 if dora else 3)
    assert distance(found, gradients(theirs, lambda model: model(IDS))) < 3e-6


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("how", ["frozen-bf16", "bf16", "autocast"])
def test_forwards_in_two_dtypes_are_peft_s_within_their_rounding(dora: bool, how: str) -> None:
    theirs = adapted(Layers(), use_dora=dora)
    stir(theirs)
    for name, parameter in theirs.named_parameters():
        if how == "bf16" or (how == "frozen-bf16" and "lora_" not in name):
            parameter.data = parameter.data.bfloat16()
    ours = copy.deepcopy(theirs)
    use_own_layers(ours)

    def call(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return model(IDS)

    found, wanted = gradients(ours, call), gradients(theirs, call)
    assert [t.dtype for t in found.values()] == [t.dtype for t in wanted.values()]
    assert distance(found, wanted) < 4e-2


class _Large(TorchDispatchMode):
    """Counts the tensors made that have as many elements as a layer's output."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.count, self._elements = 0, elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self._elements:
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            self.count += result.untyped_storage().data_ptr() not in given
        return result


@pytest.mark.parametrize(("dora", "fewer"), [(False, 2), (True, 3)], ids=["lora", "dora"])
def test_a_forward_makes_fewer_tensors_as_large_as_the_output_than_peft_s(dora: bool, fewer: int) -> None:
    theirs = adapted(nn.Sequential(nn.Linear(8, 32, bias=False)), target_modules=["0"], use_dora=dora)
    ours, x, counts = copy.deepcopy(theirs), torch.randn(1, 64, 8), []
    use_own_layers(ours)
    for model in (ours, theirs):
        with _Large(64 * 32) as large:
            model(x).sum().backward()
        counts.append(large.count)
    assert counts[1] - counts[0] >= fewer, counts


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trained_rows_of_tokens_are_peft_s_also_in_a_tied_head(name: str) -> None:
    theirs = adapted(tiny_model(name), target_modules=["q_proj"], trainable_token_indices=[7, 3, 50])
    stir(theirs)
    ours = copy.deepcopy(theirs)
    use_own_layers(ours)

    def call(model: nn.Module) -> Tensor:
        return model(input_ids=IDS, use_cache=False).logits

    assert distance(gradients(ours, call), gradients(theirs, call)) < 3e-6


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_with_adapters_are_peft_s_and_make_no_changed_weight(name: str, implementation: str) -> None:
    model = tiny_model(name)
    model.config._experts_implementation = implementation
    weights = ["experts.gate_up_proj", "experts.down_proj", "gate.weight" if name == "qwen3_moe" else "router.weight"]
    theirs = adapted(model, target_modules=[], target_parameters=weights)
    stir(theirs)
    ours = copy.deepcopy(theirs)
    use_own_layers(ours)

    def call(model: nn.Module) -> Tensor:
        return model(input_ids=IDS, use_cache=False).logits

    with patch.object(Updated, "whole", side_effect=AssertionError):
        found = gradients(ours, call)
    assert len(found) == 1 + 2 * 3 * 2
    assert distance(found, gradients(theirs, call)) < 1e-5


def test_a_changed_weight_answers_like_the_sum_whatever_is_asked_of_it() -> None:
    torch.manual_seed(0)
    weight, left, right = torch.randn(3, 5, 4), torch.randn(3, 5, 2), torch.randn(3, 2, 4)
    lazy, whole = Updated(weight, left, right), weight + left @ right
    x, y = torch.randn(3, 6, 5), torch.randn(3, 4, 6)
    chosen = torch.tensor([2, 0])
    for found, wanted in [
        (x @ lazy, x @ whole),
        (lazy @ y, whole @ y),
        (torch.bmm(x, lazy), torch.bmm(x, whole)),
        (lazy[1].T @ x[0].T, whole[1].T @ x[0].T),
        (x[chosen] @ lazy[chosen], x[chosen] @ whole[chosen]),
        (lazy[0, :2], whole[0, :2]),
        (lazy.chunk(2, -1)[1], whole.chunk(2, -1)[1]),
        (torch.einsum("eni,eij->enj", x, lazy), torch.einsum("eni,eij->enj", x, whole)),
        (lazy.mT.transpose(0, 1), whole.mT.transpose(0, 1)),
    ]:
        torch.testing.assert_close(found, wanted)
    assert (lazy.shape, lazy.dtype, len(lazy)) == (whole.shape, whole.dtype, 3)


def begun(model: nn.Module, init: str, **settings: Any) -> nn.Module:
    """`model` with an adapter that was put in on meta, as a run does it."""
    bare = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.device("meta"):
        meta = adapted(copy.deepcopy(model).to("meta"), **settings)
    use_own_layers(meta)
    check_beginning(meta, init)
    for name in list(dict(meta.named_parameters())):
        if (inside := name.replace(".base_layer", "")) in bare:
            path, _, leaf = name.rpartition(".")
            meta.get_submodule(path)._parameters[leaf] = nn.Parameter(bare[inside])
    remember(meta, Adapter(AdapterSection(init_lora_weights=init), LoraConfig(), {}, frozenset()))
    initialize_adapter(meta, 3, CPU)
    take_from_weights(meta)
    return meta


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("init", ["pissa", "olora", "pissa_niter_8"])
def test_what_is_made_of_weights_is_peft_s_and_changes_no_output(init: str, dora: bool) -> None:
    """For OLoRA PEFT decomposes the weight of a Conv1D the wrong way round, and shapes do not fit; here it is as any other."""
    model = Layers()
    ours = begun(model, init, use_dora=dora)
    torch.testing.assert_close(ours(IDS), model(IDS), rtol=1e-5, atol=1e-5)
    for matrix in (ours.up.lora_A.default, ours.up.lora_B.default):
        assert torch.equal(matrix.initial, matrix.weight)
    if "niter" in init:
        return
    targets = [name for name in ALL if not (init == "olora" and name == "across")]
    peft = adapted(model, target_modules=targets, init_lora_weights=init, use_dora=dora)
    names = {name for name, _ in peft.named_parameters() if "embedding_" not in name and "across" not in name}
    found, theirs = ({n: p.detach() for n, p in m.named_parameters() if n in names} for m in (ours, peft))
    assert distance(found, theirs) < 1e-5


def test_random_matrices_have_peft_s_distributions_and_follow_from_seed_and_name() -> None:
    torch.manual_seed(0)
    wide = nn.ModuleDict({"a": nn.Linear(400, 50), "b": nn.Linear(400, 50), "e": nn.Embedding(60, 500)})

    def values(init: str) -> dict[str, Tensor]:
        return dict(begun(wide, init, r=20, target_modules=["a", "b", "e"]).named_parameters())

    found, again, gaussian = values("default"), values("default"), values("gaussian")
    assert all(torch.equal(found[name], again[name]) for name in found)
    first = found["a.lora_A.default.weight"]
    assert not torch.equal(first, found["b.lora_A.default.weight"])
    assert 0.99 / 20 < float(first.abs().max()) <= 1 / 20  # uniform to 1 / sqrt(400)
    assert float(first.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)
    assert float(gaussian["a.lora_A.default.weight"].std()) == pytest.approx(1 / 20, rel=0.03)
    assert float(found["e.lora_embedding_B.default"].std()) == pytest.approx(1, rel=0.03)
    for name in ("a.lora_B.default.weight", "e.lora_embedding_A.default"):
        assert not found[name].any()


def _cannot_begin() -> Iterator[tuple[nn.Module, dict[str, Any], str]]:
    yield Layers(), {"r": 13, "target_modules": ["down"]}, r"peft.r: 13 is more than down has .*at most 12"
    tied = Layers()
    tied.again = tied.up
    yield tied, {"target_modules": ["up"]}, "which again and up share"
    experts = ["mlp.experts.down_proj"]
    yield (
        tiny_model("qwen3_moe"),
        {"target_modules": [], "target_parameters": experts},
        "experts.down_proj is a stack",
    )


@pytest.mark.parametrize(("model", "settings", "message"), [*_cannot_begin()], ids=["rank", "shared", "experts"])
def test_what_cannot_begin_as_a_part_of_the_weights_is_refused_by_name(
    model: nn.Module, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_beginning(adapted(model.to("meta"), **settings), "pissa")


def test_dropout_draws_for_a_rank_of_its_own_where_ranks_hold_different_things() -> None:
    """Case C52. The common generator goes on alike, also where a block runs again; with probability 0 it stays where it is."""
    x, dropout = torch.ones(2000, 8), nn.Dropout(0.25)

    def mask(stream: int | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return drop(x, dropout, stream), torch.get_rng_state()

    (first, state), (second, other) = mask(0), mask(1)
    assert torch.equal(state, other)
    assert torch.equal(first, mask(0)[0])
    both = ((first == 0) & (second == 0)).float().mean()
    assert float(both) == pytest.approx(0.25**2, abs=0.01)
    for found in (first, mask(None)[0]):
        assert found.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert float((found == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    before = torch.get_rng_state()
    assert drop(x, nn.Dropout(0.0), 0) is x
    assert drop(x, nn.Identity(), 0) is x
    assert drop(x, nn.Dropout(0.5).eval(), 0) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_of_modules_follow_the_plan_of_those_in_whose_place_they_run() -> None:
    """The module stays where PEFT puts it and is cut alike; hooks go where the forward goes."""
    model = adapted(tiny_model("llama"), target_modules=["q_proj"], modules_to_save=["lm_head", "mlp"])
    mlp = "model.layers.0.mlp"
    inner = {path: f"{path}.original_module" for path in ("lm_head", mlp, "model.layers.1.mlp")}
    remember(model, Adapter(AdapterSection(), LoraConfig(), inner, frozenset()))
    across = Cut("tp", 0, (40,))
    plan = Plan(
        units=("model.layers.0", "model.layers.1"),
        splits=(Split((mlp, f"{mlp}.up_proj"), (mlp,)),),
        cuts={"lm_head.weight": Cut("tp", 0, (97,)), f"{mlp}.up_proj.weight": across},
        shared=frozenset({f"{mlp}.down_proj.bias"}),
        attributes={f"{mlp}.act": {"width": 20}, mlp: {"size": 4}},
        vocabulary=("model.embed_tokens", "lm_head"),
        gathered=frozenset({f"{mlp}.up_proj"}),
    )
    found = with_copies(plan, model)
    own, copied = f"{mlp}.original_module", f"{mlp}.modules_to_save.default"
    head = "lm_head.modules_to_save.default"
    assert found.splits == (Split((mlp, f"{copied}.up_proj"), (mlp,)),)
    assert set(found.cuts) == {"lm_head.weight", f"{head}.weight", f"{own}.up_proj.weight", f"{copied}.up_proj.weight"}
    assert found.shared == {f"{own}.down_proj.bias", f"{copied}.down_proj.bias"}
    assert set(found.attributes) == {f"{own}.act", f"{copied}.act", mlp, copied}
    assert found.vocabulary == ("model.embed_tokens", "lm_head", head)
    assert found.gathered == {f"{copied}.up_proj"}
    assert found.idle == ("lm_head.original_module", own, "model.layers.1.mlp.original_module")
    with pytest.raises(ModelError, match=r"modules_to_save: model.layers.0.mlp is, or holds, a whole block"):
        with_copies(replace(plan, units=(mlp,)), model)
    with pytest.raises(ModelError, match=r"modules_to_save: model.layers.0.mlp holds experts"):
        with_copies(replace(plan, experts=(Experts(f"{mlp}.experts", 4, ("up",), ("n",)),)), model)
