"""What no config declares is proved on a twin, and the proof can fail."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from meshtune.data.batch import Batch
from meshtune.errors import ModelError
from meshtune.models import attention, causal_lm, proofs, trial
from meshtune.models.attention import DOCUMENT_ATTENTION
from meshtune.models.proofs import choose_attention
from meshtune.models.section import ModelSection
from meshtune.models.source import Source
from meshtune.models.source import causal_lm as architecture
from meshtune.models.trial import Trial
from tests.unit.models_tiny import tiny_source

CPU = torch.device("cpu")
FP32 = torch.float32


def _choose(name: str, packing: bool, attention: str = "auto", **changes: Any) -> str:
    return choose_attention(tiny_source(name, attention, **changes), packing, CPU, FP32).implementation


def _refusal(name: str, packing: bool, attention: str = "auto", **changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        _choose(name, packing, attention, **changes)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "padded", "packed"),
    [
        ("llama-odd", "sdpa", DOCUMENT_ATTENTION),
        ("qwen2-window", "sdpa", DOCUMENT_ATTENTION),
        ("gemma2", "eager", DOCUMENT_ATTENTION),
        ("gpt_oss", "eager", DOCUMENT_ATTENTION),
        ("deepseek_v3", "sdpa", DOCUMENT_ATTENTION),
        ("gpt2", "sdpa", DOCUMENT_ATTENTION),
        ("bert", "sdpa", DOCUMENT_ATTENTION),
    ],
)
def test_auto_takes_the_first_implementation_that_is_exact(name: str, padded: str, packed: str) -> None:
    assert _choose(name, False) == padded
    assert _choose(name, True) == packed


def test_a_packed_row_longer_than_the_models_tables_is_tried() -> None:
    """Documents fit the model's positions, but the row that they share does not: GPT-Neo's mask is a table of fixed size."""
    source = tiny_source("gpt_neo", max_position_embeddings=40)
    assert choose_attention(source, True, CPU, FP32, longest_row=40).implementation == "eager"
    with pytest.raises(ModelError) as refusal:
        choose_attention(source, True, CPU, FP32, longest_row=80)
    assert "longer than the 40 positions" in str(refusal.value) and "per_device_batch_size: 1" in str(refusal.value)
    learnt = tiny_source("gpt2", n_positions=40)
    assert choose_attention(learnt, True, CPU, FP32, longest_row=80).implementation == DOCUMENT_ATTENTION


def test_a_resumed_run_keeps_what_auto_chose_where_it_runs() -> None:
    source = tiny_source("llama")
    assert choose_attention(source, False, CPU, FP32, preferred="eager").implementation == "eager"
    assert choose_attention(source, False, CPU, FP32, preferred="flash_attention_2").implementation == "sdpa"


def test_what_is_asked_for_runs_or_is_refused_with_its_reason() -> None:
    assert _choose("llama", True, "eager") == _choose("llama", False, "eager") == "eager"
    assert _choose("llama", True, "sdpa") == DOCUMENT_ATTENTION and _choose("llama", False, "sdpa") == "sdpa"
    assert "does not offer it" in _refusal("gemma2", False, "sdpa")
    assert "no scaled-dot-product attention" in _refusal("gemma2", True, "sdpa")
    flash = _refusal("llama", True, "flash_attention_2")
    assert (
        "model.attention: flash_attention_2 cannot run LlamaForCausalLM packed" in flash and "FlashAttention2" in flash
    )


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_alibi_and_recurrence_pack_nowhere_and_pad_exactly(name: str) -> None:
    refusal = _refusal(name, True)
    assert (
        "a packed batch changes a document's hidden states by" in refusal and "write `data.packing: false`" in refusal
    )
    assert [line.split(":")[0].strip() for line in refusal.splitlines()[1:]] == [
        "sdpa, one call per document",
        "sdpa",
        "eager",
    ]
    assert _choose(name, False) == "eager"


def test_an_encoder_is_no_causal_language_model() -> None:
    """A position that sees later ones would be trained to copy its target."""
    assert "a position sees later ones" in _refusal("bert", False, is_decoder=False)


def _register(name: str, **fixed: Any) -> None:
    """An implementation like ours, but with some of its arguments fixed."""

    def faulty(*args: Any, **settings: Any) -> Any:
        return attention.document_attention(*args, **{**settings, **fixed})

    AttentionInterface.register(name, faulty)
    AttentionMaskInterface.register(name, lambda *_args, **_settings: None)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("qwen2-window", {"sliding_window": None}),
        ("qwen2-window", {"sliding_window": 5}),
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"s_aux": None}),
        ("granite", {"scaling": None}),
        ("llama", {"is_causal": False}),
    ],
)
def test_an_implementation_that_ignores_what_the_model_asks_is_found_out(
    name: str, ignored: dict[str, Any], training: bool
) -> None:
    """In training and in evaluation mode, each alone, so that neither hides behind the other."""
    _register("faulty", **ignored)
    tried = Trial(tiny_source(name), True, CPU)
    reference = tried._reference(FP32)
    assert reference.compare(tried._twin(DOCUMENT_ATTENTION, FP32).train(training)) is None
    reason = reference.compare(tried._twin("faulty", FP32).train(training))
    assert reason is not None and "a packed batch changes a document's hidden states" in reason


@pytest.mark.parametrize("implementation", ["eager", "sdpa", DOCUMENT_ATTENTION])
def test_a_leak_between_documents_is_found_out(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C29, C30: one document's borders forgotten, by transformers' own packed mask or by ours."""
    tried = Trial(tiny_source("llama"), True, CPU)
    assert tried(implementation, FP32) is None
    monkeypatch.setattr(causal_lm, "documents", lambda *_: nullcontext())
    reason = tried(implementation, FP32)
    assert reason is not None and "a packed batch changes a document's hidden states" in reason


def test_a_wrong_gradient_alone_is_found_out() -> None:
    def detached(*args: Any, **settings: Any) -> Any:
        output, weights = attention.document_attention(*args, **settings)
        return output.detach(), weights

    AttentionInterface.register("detached", detached)
    AttentionMaskInterface.register("detached", lambda *_args, **_settings: None)
    reason = Trial(tiny_source("llama"), True, CPU)("detached", FP32)
    assert reason is not None and "changes the gradient" in reason


def test_a_head_that_is_not_the_models_own_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = causal_lm.CausalLM.head
    monkeypatch.setattr(causal_lm.CausalLM, "head", lambda self, hidden_states: 2 * real(self, hidden_states))
    assert "its head run on chosen positions differs from its own logits" in _refusal("llama", False)


def test_a_padded_batch_that_reads_its_padding_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "collate_padded", _padded_on_the_left)
    assert "a padded batch changes a document's hidden states" in _refusal("gpt2", False)


def _padded_on_the_left(documents: Any, pad_token_id: int) -> Batch:
    width = max(len(ids) for ids, _ in documents)
    rows = torch.tensor([[pad_token_id] * (width - len(ids)) + list(ids) for ids, _ in documents])
    mask = torch.stack([torch.arange(width) >= width - len(ids) for ids, _ in documents])
    return Batch(
        input_ids=rows, position_ids=torch.arange(width).expand(rows.shape), shift_labels=rows, attention_mask=mask
    )


def test_a_proof_is_kept_and_a_refusal_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    class Counting(Trial):
        def __call__(self, implementation: str, dtype: torch.dtype) -> str | None:
            tries.append(implementation)
            return super().__call__(implementation, dtype)

    monkeypatch.setattr(proofs, "Trial", Counting)
    for _ in range(2):
        choose_attention(tiny_source("llama"), True, CPU, FP32, tmp_path / "proofs")
    assert tries == [DOCUMENT_ATTENTION]
    choose_attention(tiny_source("llama", rms_norm_eps=1e-4), True, CPU, FP32, tmp_path / "proofs")
    choose_attention(tiny_source("llama"), False, CPU, FP32, tmp_path / "proofs")
    assert tries == [DOCUMENT_ATTENTION, DOCUMENT_ATTENTION, "sdpa"]
    for _ in range(2):
        with pytest.raises(ModelError):
            choose_attention(tiny_source("mamba", "eager"), True, CPU, FP32, tmp_path / "proofs")
    assert tries[3:] == ["eager", "eager"]
    monkeypatch.setattr(proofs, "_own_code", lambda: "other code")
    choose_attention(tiny_source("llama"), True, CPU, FP32, tmp_path / "proofs")
    assert tries[5:] == [DOCUMENT_ATTENTION]


def _over_ranks(name: str, packing: bool, attention: str = "auto", method: str = "allgather", size: int = 2) -> str:
    source = tiny_source(name, attention)
    return choose_attention(source, packing, CPU, FP32, context=(size, method)).description


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", ["llama-odd", "qwen2-window", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_a_sequence_is_cut_where_only_attention_mixes_its_tokens(name: str, packing: bool) -> None:
    assert _over_ranks(name, packing) == "sdpa, one call per document, over 2 ranks by allgather"


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_the_method_asked_for_is_tried(method: str) -> None:
    """Three heads cannot be shared out over two ranks, which are what is tried; over three they can."""
    for name, size in (("gemma2", 2), ("llama-odd", 3)):
        assert _over_ranks(name, True, method=method, size=size).endswith(f"over {size} ranks by {method}")


@pytest.mark.parametrize(
    ("name", "packing", "cause"),
    [
        ("mamba", True, "a packed batch"),
        ("bloom", False, "a padded batch"),
    ],
)
def test_a_mixer_that_needs_more_than_its_rows_is_refused_with_what_would_work(
    name: str, packing: bool, cause: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        _over_ranks(name, packing)
    assert "distributed.cp_size: 2 cannot run" in str(refusal.value) and "write `cp_size: 1`" in str(refusal.value)
    assert f"{cause} changes a document's hidden states" in str(refusal.value)


def test_a_recurrent_layer_is_given_whole_sequences_and_no_other_is(tmp_path: Path) -> None:
    source = tiny_source("mamba")
    for _ in range(2):  # found, and then known
        found = choose_attention(source, False, CPU, FP32, tmp_path, context=(2, "allgather"))
        assert found.whole == ("MambaMixer",)
        assert found.description.endswith("over 2 ranks by allgather; whole sequences in MambaMixer")


def test_an_architecture_with_attention_of_its_own_is_refused() -> None:
    model_class, config = architecture(
        AutoConfig.for_model("falcon", hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    )
    source = Source(ModelSection(name="falcon", weights="random"), "falcon", config, model_class)
    with pytest.raises(ModelError, match="does not call attention through transformers' attention interface"):
        choose_attention(source, True, CPU, FP32, context=(2, "allgather"))


def test_what_cannot_be_cut_by_its_sizes_is_refused_before_any_twin() -> None:
    with pytest.raises(ModelError, match=r"write `model\.attention: auto`, not eager"):
        _over_ranks("llama", False, "eager")
    with pytest.raises(
        ModelError, match="4 attention heads cannot be shared out over 3 ranks; write `cp_method: allgather`"
    ):
        _over_ranks("llama", False, method="ulysses", size=3)
    with pytest.raises(ModelError, match="its config sets attention_dropout"):
        choose_attention(tiny_source("llama", attention_dropout=0.1), False, CPU, FP32, context=(2, "ring"))


def test_rotary_positions_that_depend_on_the_length_of_a_document_are_refused_where_it_may_pass() -> None:
    """The ranks of one document would not agree on its length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    source = tiny_source("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    settings: dict[str, Any] = {"longest_row": 64, "context": (2, "allgather")}
    with pytest.raises(ModelError, match="documents of more than 32 tokens"):
        choose_attention(source, True, CPU, FP32, **settings)
    assert (
        choose_attention(source, True, CPU, FP32, longest_document=32, **settings).implementation == DOCUMENT_ATTENTION
    )
