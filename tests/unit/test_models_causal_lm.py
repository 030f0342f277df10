"""Trunk and head run apart give the model's own numbers, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshtune.data.batch import Batch
from meshtune.errors import ModelError
from meshtune.models.causal_lm import CausalLM
from tests.unit.models_tiny import CONFIGS, stirred, tiny_model

IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.arange(9).expand(2, 9)
PADDING = torch.arange(9) < torch.tensor([[9], [5]])


def _apart(model: CausalLM, chosen: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of chosen positions [n, vocab], the head run two positions at a time."""
    hidden_states = model.hidden_states(IDS, POSITIONS, mask)
    return torch.cat([model.head(chunk) for chunk in hidden_states[chosen].split(2)])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_on_chosen_positions_gives_the_models_own_logits(name: str) -> None:
    """Logit scales, soft-caps, nested heads (bert) and layers between trunk and head (electra) included."""
    model = tiny_model(name)
    chosen = torch.rand(2, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits[chosen]
        found = _apart(CausalLM(model), chosen)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-odd", "gpt2", "opt", "bloom", "mamba", "bert", "gemma3"])
def test_a_padded_batch_gives_the_models_own_logits_on_real_tokens(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        alone = [
            model(input_ids=row[real][None], use_cache=False).logits[0] for row, real in zip(IDS, PADDING, strict=True)
        ]
        found = _apart(CausalLM(model), PADDING, PADDING)
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_positions_of_a_row_that_is_not_packed_are_the_models_own() -> None:
    """RoBERTa counts positions from an offset: positions from 0 would give it embeddings that it never learnt."""
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "vocab_size": 97,
    }
    config = AutoConfig.for_model("roberta", is_decoder=True, **sizes)
    model = stirred(AutoModelForCausalLM.from_config(config)).eval()
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        found = (
            CausalLM(model).head(CausalLM(model).hidden_states(IDS, POSITIONS, None).flatten(0, 1)).view(wanted.shape)
        )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "cohere2", "granite", "mixtral", "electra"])
def test_gradients_are_those_of_the_models_own_forward(name: str) -> None:
    plain, apart = tiny_model(name).train(), CausalLM(tiny_model(name)).train()
    chosen = torch.ones(2, 9, dtype=torch.bool)
    weights = torch.randn(18, plain.get_output_embeddings().weight.shape[0])
    (plain(input_ids=IDS, use_cache=False).logits.flatten(0, 1) * weights).sum().backward()
    (_apart(apart, chosen) * weights).sum().backward()
    for (path, a), b in zip(apart.model.named_parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            largest = max(b.grad.abs().max().item(), 1.0)  # the gradient of a key's bias is zero but for rounding
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5 * largest, msg=path)


@pytest.mark.parametrize("name", ["llama", "bert", "opt"])
def test_the_model_is_untouched(name: str) -> None:
    """Its class, its modules, its parameters and its own forward are what they were before."""
    model = tiny_model(name)
    with torch.no_grad():
        before = model(input_ids=IDS, use_cache=False).logits
    kind, modules, parameters = type(model), list(model.named_modules()), dict(model.named_parameters())
    values = {path: parameter.detach().clone() for path, parameter in parameters.items()}
    forward = kind.forward
    with torch.no_grad():
        _apart(CausalLM(model), torch.ones(2, 9, dtype=torch.bool))
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)
    assert type(model) is kind and kind.forward is forward and "forward" not in vars(model)
    assert [(p, id(m)) for p, m in model.named_modules()] == [(p, id(m)) for p, m in modules]
    for path, parameter in model.named_parameters():
        assert parameter is parameters[path] and torch.equal(parameter, values[path]) and parameter.grad is None


def test_names_are_the_models_own_and_head_parameters_the_output_embedding() -> None:
    model = tiny_model("llama-tied")
    wrapped = CausalLM(model)
    assert [f"model.{path}" for path, _ in model.named_parameters()] == [path for path, _ in wrapped.named_parameters()]
    assert (
        [id(p) for p in wrapped.head_parameters] == [id(model.lm_head.weight)] == [id(model.model.embed_tokens.weight)]
    )


def test_a_batch_opens_its_documents_and_the_objective_runs_inside_forward() -> None:
    model = CausalLM(tiny_model("llama", "meshtune_documents"))
    batch = Batch(
        input_ids=IDS[:1], position_ids=POSITIONS[:1], shift_labels=IDS[:1], document_lengths=torch.tensor([4, 5])
    )
    with model.documents(batch), torch.no_grad():
        packed = model(lambda m, b: m.hidden_states(b.input_ids, b.position_ids, b.attention_mask), batch)
    with torch.no_grad():
        alone = model.hidden_states(IDS[:1, :4], POSITIONS[:1, :4], None)
        whole = model.hidden_states(IDS[:1], POSITIONS[:1], None)
    torch.testing.assert_close(packed[:, :4], alone)
    assert not torch.allclose(packed[:, 4:], whole[:, 4:])


class _Headless(PreTrainedModel):
    """A model that computes its logits without calling its output embedding."""

    config_class = type(AutoConfig.for_model("llama"))

    def __init__(self, config: object):
        super().__init__(config)
        self.trunk = nn.Sequential(nn.Embedding(10, 4))
        self.head = nn.Linear(4, 10)

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk[0]

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(self, input_ids: Tensor, **_: object) -> Tensor:
        return self.trunk(input_ids) @ self.head.weight.T


def test_what_cannot_be_taken_apart_is_an_error_that_says_why() -> None:
    config = AutoConfig.for_model("llama", vocab_size=10, hidden_size=4, num_attention_heads=1)
    with pytest.raises(ModelError, match="did not call its output embedding"):
        CausalLM(_Headless(config)).hidden_states(IDS % 10, POSITIONS, None)
    headless = _Headless(config)
    headless.get_output_embeddings = lambda: None
    with pytest.raises(ModelError, match="no output embedding"):
        CausalLM(headless)
    flat = _Headless(config)
    flat.trunk = flat.trunk[0]
    flat.get_input_embeddings = lambda: flat.trunk
    with pytest.raises(ModelError, match="does not keep its trunk and its head in separate modules"):
        CausalLM(flat)
